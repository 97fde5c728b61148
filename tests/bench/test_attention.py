"""A whole run at toy size, and what it leaves behind."""

import argparse
import io
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from molflt.bench import attention, measure
from molflt.bench.attention import bench_attention, resolve_device
from molflt.bench.attention_contenders import (
    FLT,
    PERFORMER,
    PERFORMER_PYTORCH,
    PYG,
    SOFTMAX,
    make_contenders,
    make_inputs,
)
from molflt.bench.attention_report import aim_table, measurement_table, print_report, to_dict, write_report
from molflt.bench.attention_results import AttentionBench, Measurement
from molflt.bench.attention_settings import AttentionBenchSettings
from molflt.bench.measure import peak_memory
from molflt.bench.options import add_options
from molflt.errors import InputError

LENGTHS = (1024, 7, 1031)
BUDGET = 2**20
"""Bytes; N x N weights of two heads take 8 MiB at the long lengths."""


@pytest.fixture(scope="module", autouse=True)
def _small_and_quick() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MATMUL_SIZE", 17)
        patch.setattr(measure, "SHORTEST_SAMPLE", 1e-9)
        yield


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> AttentionBenchSettings:
    return AttentionBenchSettings(
        lengths=LENGTHS,
        heads=2,
        head_dim=3,
        features=5,
        frequencies=2,
        repeats=3,
        threads=1,
        freed_memory="returned",
        memory_budget=BUDGET / 2**30,
        output=str(tmp_path_factory.mktemp("bench")),
    )


@pytest.fixture(scope="module")
def result(settings: AttentionBenchSettings) -> AttentionBench:
    # Without the optional package the comparison is the same on every machine.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "performer_pytorch", None)
        return bench_attention(settings)


def report_of(result: AttentionBench) -> str:
    text = io.StringIO()
    print_report(result, Console(file=text, width=140))
    return text.getvalue()


def test_every_contender_is_measured_or_skipped_once_at_every_length(result: AttentionBench) -> None:
    found = [(m.level, m.mode, m.length, m.contender) for m in result.measurements]
    assert found == [
        (level, mode, length, contender)
        for level in ("core", "layer")
        for mode in ("forward", "training")
        for length in LENGTHS
        for contender in (FLT, PERFORMER, SOFTMAX, PYG)
    ]


def test_only_pairs_above_the_budget_are_skipped_and_the_reason_says_how_much(
    result: AttentionBench,
) -> None:
    skipped = {(m.contender, m.length) for m in result.measurements if m.skipped is not None}
    assert skipped == {(SOFTMAX, 1024), (SOFTMAX, 1031)}
    row = next(m for m in result.measurements if m.skipped is not None)
    assert row.skipped is not None
    assert row.skipped.endswith("above the budget of 0.000976562 GiB")
    need = float(row.skipped.split()[2])
    assert 1 < need * 2**30 / (4 * 2 * 1024**2) < 1.5
    assert row.seconds == ()


def test_measured_rows_have_a_sample_a_round_memory_and_products(result: AttentionBench) -> None:
    for row in result.measurements:
        if row.skipped is None:
            assert len(row.seconds) == 3
            assert min(row.seconds) > 0
            assert row.peak_memory >= 4 * 2 * 3 * row.length
            assert row.matmul_flops > 0
    assert len(result.matmul_rate) == 2 * 2 * len(LENGTHS) * 3


def test_memory_and_products_are_those_of_the_contenders_call(
    result: AttentionBench, settings: AttentionBenchSettings
) -> None:
    contender = make_contenders(settings, "core").present[1]
    inputs = make_inputs(settings, "core", 1031)
    contender.train(inputs)
    (row,) = (m for m in result.select("core", "training", PERFORMER) if m.length == 1031)
    assert row.peak_memory == peak_memory(lambda: contender.train(inputs), torch.device("cpu"))
    (forward,) = (m for m in result.select("core", "forward", PERFORMER) if m.length == 1031)
    assert forward.matmul_flops == 2 * 2 * 1031 * 4 * 3 * 5
    # Projections have one gradient, the two products with the state have two: 6 more than the forward's 4.
    assert 4 * row.matmul_flops == 10 * forward.matmul_flops


def test_peak_memory_of_linear_attention_grows_linearly(result: AttentionBench) -> None:
    for level in ("core", "layer"):
        for name in (FLT, PERFORMER):
            short, long = (m for m in result.select(level, "forward", name) if m.length > 7)
            assert long.peak_memory / short.peak_memory == pytest.approx(1031 / 1024, rel=2e-3)


def test_the_number_of_threads_is_the_one_asked_for(result: AttentionBench) -> None:
    assert result.threads == 1
    assert to_dict(result)["environment"]["threads"] == 1


def test_the_json_holds_every_measurement_growth_and_aim(
    result: AttentionBench, settings: AttentionBenchSettings
) -> None:
    paths = write_report(result, settings.output)
    assert [path.name for path in paths] == ["attention.json", "attention.png"]
    assert sorted(path.name for path in Path(settings.output).iterdir()) == [path.name for path in paths]
    read = json.loads(paths[0].read_text())
    assert (read["format"], read["version"]) == ("molflt attention bench", 1)
    assert read["settings"]["lengths"] == list(LENGTHS)
    assert read["absent"] == {PERFORMER_PYTORCH: 'not installed; pip install "molflt[bench]"'}
    assert set(read["contenders"]) == {FLT, PERFORMER, SOFTMAX, PYG}
    assert torch.__version__.startswith(read["environment"]["packages"]["torch"])
    assert len(read["measurements"]) == len(result.measurements)
    for row, measured in zip(read["measurements"], result.measurements, strict=True):
        assert (row["contender"], row["length"]) == (measured.contender, measured.length)
        assert row["skipped"] == measured.skipped
        assert ("seconds" in row) == (measured.skipped is None)
        if measured.skipped is None:
            assert row["seconds"]["samples"] == list(measured.seconds)
            assert row["seconds"]["median"] == sorted(measured.seconds)[1]
            assert row["peak_memory"] == measured.peak_memory
            assert row["matmul_share"] == result.matmul_share(measured)
    assert {row["contender"] for row in read["growth"]} == {FLT, PERFORMER, PYG}
    for row in read["growth"]:
        assert row["memory"] == pytest.approx(1.0, abs=0.3)
        assert row["time"]["minimum"] <= row["time"]["median"] <= row["time"]["maximum"]
    assert len(read["aims"]) == len(result.aims()) == 12
    for aim in read["aims"]:
        assert aim["met"] == (None if aim["figure"] is None else aim["figure"] <= aim["limit"])


def test_the_plot_is_a_png_with_an_axis_pair_a_level_and_mode(
    result: AttentionBench, settings: AttentionBenchSettings
) -> None:
    from molflt.bench.attention_report import plot

    path = write_report(result, settings.output)[1]
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    figure = plot(result)
    axes = figure.axes
    assert [axis.get_title() for axis in axes] == [
        f"{level}, {mode}: {quantity}"
        for level in ("core", "layer")
        for mode in ("forward", "training")
        for quantity in ("time", "peak memory")
    ]
    assert [axis.get_ylabel() for axis in axes[:2]] == ["time (ms)", "peak memory (MiB)"]
    title = figure.get_suptitle()
    assert "B=1 H=2 D=3 M=5 R=2, float32, cpu, 1 CPU threads, 3 rounds" in title
    assert "error bars: fastest to slowest round" in title
    assert {(axis.get_xscale(), axis.get_yscale()) for axis in axes} == {("log", "log")}
    lines = {line.get_label(): line for line in axes[1].lines}
    expected = result.select("core", "forward", FLT)
    assert list(lines[FLT].get_xdata()) == [m.length for m in expected] == sorted(LENGTHS)
    assert list(lines[FLT].get_ydata()) == [m.peak_memory / 2**20 for m in expected]
    assert list(lines[SOFTMAX].get_xdata()) == [7]


def test_curves_of_the_plot_that_coincide_can_be_told_apart(result: AttentionBench) -> None:
    from molflt.bench.attention_report import plot

    figure = plot(result)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [FLT, PERFORMER, SOFTMAX, PYG]
    for axis in figure.axes:
        assert axis.get_legend() is None
        curves = [line for line in axis.lines if line.get_marker() in tuple("osD^x")]
        assert len({line.get_marker() for line in curves}) == 4
        assert len({line.get_markersize() for line in curves}) == 4
        assert {line.get_markerfacecolor() for line in curves} == {"none"}


def test_the_tables_say_who_was_measured_skipped_and_absent(result: AttentionBench) -> None:
    text = report_of(result)
    assert "1 CPU threads, 3 rounds, wall time" in text
    assert text.count("core, forward: median (min to max)") == 1
    assert text.count("growth from N = 1,024 on") == 1
    assert text.count("skipped: needs about") == 8
    assert text.count("absent: not installed") == 4
    assert 'pip install "molflt[bench]"' in text
    row = next(m for m in result.measurements if m.contender == PYG)
    assert f"{1e3 * sorted(row.seconds)[1]:.3g} ({1e3 * min(row.seconds):.3g} to" in text
    assert text.count("not measured") == sum(aim.figure is None for aim in result.aims()) == 2


def test_the_share_is_said_to_be_of_the_fastest_round(result: AttentionBench) -> None:
    headings = [column.header for column in measurement_table(result, "core", "forward").columns]
    assert headings[-1] == "share of matmul peak,\nfastest round (%)"


def test_the_lengths_that_aims_need_are_said_where_one_is_not_measured() -> None:
    def table(names: tuple[str, ...], lengths: tuple[int, ...]) -> str:
        rows = [
            Measurement(level, mode, name, length, (1e-3 * length,) * 2, length, length)
            for level in ("core", "layer")
            for mode in ("forward", "training")
            for name in names
            for length in lengths
        ]
        run = AttentionBench(
            AttentionBenchSettings(lengths=lengths), 1, tuple(rows), dict.fromkeys(names, ""), {}, (1.0,)
        )
        text = io.StringIO()
        Console(file=text, width=140).print(aim_table(run))
        return text.getvalue()

    names = (FLT, PERFORMER, PERFORMER_PYTORCH)
    assert "two lengths N ≥ 1,024" in table(names, (64, 256))
    assert "two lengths" in table(names[:2], (1024, 2048))
    complete = table(names, (1024, 2048))
    assert "two lengths" not in complete
    assert "not measured" not in complete


def test_the_command_measures_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, AttentionBenchSettings)
    words = "--lengths 5,7 --heads 2 --head-dim 3 --features 4 --frequencies 2 --repeats 2"
    options = ["--clock", "cpu", "--level", "core", "--freed-memory", "returned"]
    output = tmp_path / "new" / "folder"
    arguments = parser.parse_args([*words.split(), *options, "--output", str(output)])
    assert attention.run(arguments) == 0
    printed = capsys.readouterr().out
    assert "cpu time, freed memory returned" in printed
    assert f"written: {output / 'attention.json'}" in printed
    assert "growth from" not in printed
    read = json.loads((output / "attention.json").read_text())
    assert read["settings"]["clock"] == "cpu"
    assert all(math.isfinite(m["matmul_share"]) for m in read["measurements"])


def test_a_folder_that_can_not_be_made_is_said_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(attention, "bench_attention", lambda *_, **__: pytest.fail("measured"))
    parser = argparse.ArgumentParser()
    add_options(parser, AttentionBenchSettings)
    with pytest.raises(InputError, match="can not be made: Not a directory"):
        attention.run(parser.parse_args(["--output", str(tmp_path / "file" / "folder")]))


def test_a_missing_device_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    parser = argparse.ArgumentParser()
    add_options(parser, AttentionBenchSettings)
    with pytest.raises(InputError, match="no CUDA device"):
        attention.run(parser.parse_args(["--device", "cuda", "--output", str(tmp_path / "new")]))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("name", "message"), [("gpu7", "is unknown"), ("meta", "can not be measured")])
def test_an_unfit_device_is_named_with_the_remedy(name: str, message: str) -> None:
    with pytest.raises(InputError, match=f"--device {name} {message}; use cpu or cuda"):
        resolve_device(name)


def test_a_missing_cuda_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="torch finds no CUDA device; use cpu"):
        resolve_device("cuda")
