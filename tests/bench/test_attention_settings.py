"""Options of `molflt bench attention`."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from molflt.bench.attention_settings import AttentionBenchSettings
from molflt.bench.options import add_options, parse_lengths, read_options
from molflt.errors import InputError


def parse(*words: str) -> AttentionBenchSettings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, AttentionBenchSettings)
    return read_options(AttentionBenchSettings, parser.parse_args(words))


def test_without_options_the_defaults_hold() -> None:
    assert parse() == AttentionBenchSettings()


def test_every_setting_is_an_option() -> None:
    words = (
        "--lengths 64,2048 --heads 3 --head-dim 5 --features 7 --frequencies 11 --batch-size 13 --repeats 17 "
        "--level core --mode training --clock cpu --threads 2 --device cpu:0 --memory-budget 0.5 --seed 19 "
        "--output somewhere"
    )
    assert parse(*words.split()) == AttentionBenchSettings(
        lengths=(64, 2048),
        heads=3,
        head_dim=5,
        features=7,
        frequencies=11,
        batch_size=13,
        repeats=17,
        level="core",
        mode="training",
        clock="cpu",
        threads=2,
        device="cpu:0",
        memory_budget=0.5,
        seed=19,
        output="somewhere",
    )


def test_both_stands_for_each_of_the_two() -> None:
    assert (parse().levels, parse().modes) == (("core", "layer"), ("forward", "training"))
    narrow = parse("--level", "layer", "--mode", "forward")
    assert (narrow.levels, narrow.modes) == (("layer",), ("forward",))


@pytest.mark.parametrize("text", ["64,x", "", "64,", "1e3"])
def test_lengths_that_are_no_numbers_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="numbers with commas"):
        parse_lengths(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 0}, "--heads must be at least 1, got 0"),
        ({"head_dim": -1}, "--head-dim must be at least 1, got -1"),
        ({"threads": 0}, "--threads must be at least 1, got 0"),
        ({"lengths": (0,)}, "--lengths must be numbers of at least 1, got 0$"),
        ({"lengths": (64, 0)}, "--lengths must be numbers of at least 1, got 64,0$"),
        ({"lengths": ()}, "--lengths must be numbers of at least 1, got none$"),
        ({"lengths": (64, 64)}, "--lengths must differ from each other, got 64,64$"),
        ({"memory_budget": float("nan")}, "--memory-budget must be above 0"),
        ({"clock": "cpu", "device": "cuda"}, "--clock cpu does not see"),
    ],
)
def test_settings_that_can_not_be_measured_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        AttentionBenchSettings(**settings)


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file; name a folder"):
        AttentionBenchSettings(output=str(tmp_path / "file"))


def test_the_options_are_made_without_importing_torch() -> None:
    program = "import sys, molflt.bench.attention_settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
