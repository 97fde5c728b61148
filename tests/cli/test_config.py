"""`molflt config show` and `validate`, which read no data and import no torch."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from molflt.cli import main
from molflt.config import config_keys, load_config

CONFIGS = sorted(map(str, (Path(__file__).parents[2] / "configs").rglob("*.yaml")))


@pytest.fixture
def yaml_file(tmp_path):
    def write(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_show_prints_every_setting_with_the_overrides_in_it(yaml_file, tmp_path, capsys):
    """What is printed is a configuration that reads back as the one shown, from data that need not exist."""
    path = yaml_file("data: {root: /no/such/data, energy_meaning: Energie in Ångström}\nseed: 7\n")
    assert main(["config", "show", path, "--optim.lr", "1e-4", "--data.val_splits=[a,b]"]) == 0
    text = capsys.readouterr().out
    shown = load_config(yaml_file(text, "shown.yaml"))
    assert shown == load_config(path, ["--optim.lr", "1e-4", "--data.val_splits=[a,b]"])
    assert (shown.seed, shown.optim.lr, shown.data.val_splits) == (7, 1e-4, ["a", "b"])
    for key, _, _ in config_keys():
        values = yaml.safe_load(text)
        for part in key.split("."):
            values = values[part]


def test_show_escapes_what_the_terminal_can_not_write(yaml_file, monkeypatch):
    """Onto an ASCII stream the same configuration goes by codes."""
    path = yaml_file("data: {energy_meaning: Energie in Ångström}\n")
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["config", "show", path]) == 0
    text = raw.getvalue().decode("ascii")
    assert load_config(yaml_file(text, "shown.yaml")) == load_config(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optim.lrr", "1"], "unknown key --optim.lrr; the nearest valid one is --optim.lr"),
        (["--optim.lr", "fast"], "optim.lr"),
        (["--data.batch_size", "0"], "data.batch_size must be at least 1, got 0"),
    ],
)
def test_show_refuses_what_train_would_refuse(yaml_file, capsys, words, message):
    assert main(["config", "show", yaml_file("{}"), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_show_and_train_refuse_an_empty_file(yaml_file, capsys):
    path = yaml_file("")
    for words in (["config", "show", path, "--seed", "3"], ["train", path]):
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err == (
            f"molflt: error: {path} is empty; start from a file in configs/, or write {{}} for all defaults\n"
        )


def test_validate_says_ok_for_each_shipped_configuration(capsys):
    assert CONFIGS
    assert main(["config", "validate", *CONFIGS]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{path}: ok" for path in CONFIGS]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "training: {precison: 32}",
            "unknown key training.precison; the nearest valid one is training.precision",
        ),
        ("optim: {schedule: linear}", "optim.schedule"),
        ("data: {max_atoms: 5, max_edges: 7}", "data.max_edges must be null where data.max_atoms is set"),
        ("- 1", "must be a mapping"),
        ("# seed: 1", "is empty"),
    ],
)
def test_validate_stops_at_the_first_bad_one(yaml_file, capsys, text, message):
    """The files before it are ok, those after it are not looked at, and the status is 2."""
    good, bad = yaml_file("seed: 1", "good.yaml"), yaml_file(text, "bad.yaml")
    assert main(["config", "validate", good, bad, "/no/such.yaml"]) == 2
    out, err = capsys.readouterr()
    assert out == f"{good}: ok\n"
    assert err.startswith(f"molflt: error: {bad}")
    assert message in err
    assert len(err.splitlines()) == 1


def test_neither_imports_torch(yaml_file):
    program = (
        "import sys; from molflt.cli import main; status = main(['config', *sys.argv[1:]]); "
        "sys.exit(status or 'torch' in sys.modules)"
    )
    for words in (["show", yaml_file("seed: 1")], ["validate", yaml_file("seed: 1")]):
        subprocess.run([sys.executable, "-c", program, *words], check=True, stdout=subprocess.DEVNULL)
