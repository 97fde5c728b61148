"""The command line end to end: train, evaluate, predict, and one line for every kind of bad input."""

import csv
import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from molflt import cli
from molflt.checkpoint import load_checkpoint
from molflt.config import load_config, save_config
from molflt.data import oc20_sample
from molflt.errors import InputError
from molflt.evaluation import evaluate
from molflt.prediction import Predictor

FCC111 = Path(__file__).parents[2] / "datasets" / "fcc111"
STRUCTURES = sorted((FCC111 / "structures").iterdir())


@pytest.fixture
def best(finished_run):
    return str(finished_run.best_checkpoint)


def entries(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_train_evaluate_predict(tiny_config, tmp_path, capsys):
    """The three commands hand over to one another and agree with the Python functions."""
    save_config(tiny_config(tmp_path / "unused"), tmp_path / "tiny.yaml")
    run = tmp_path / "run"
    words = [str(tmp_path / "tiny.yaml"), "--training.output", str(run), "--training.epochs=2"]
    assert cli.main(["train", *words]) == 0
    out, err = capsys.readouterr()
    best = run / "checkpoints" / "best.ckpt"
    mae = load_checkpoint(best).metadata.val_metrics["val_a/energy_mae"]
    assert out == f"best checkpoint: {best} (EMA weights, val_a MAE {mae:.4f} eV)\n"
    about_data, about_training = err.splitlines()
    assert about_data.startswith("molflt: statistics of the data: train measured on 11 systems; ")
    assert about_training.startswith("epoch 2/2")
    assert load_config(run / "config.yaml") == tiny_config(run, **{"training.epochs": 2})

    assert cli.main(["evaluate", str(best), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["split"] for row in rows] == ["val_a", "val_b", "overall"]
    assert [(row["split"], row["energy_mae"]) for row in rows[:2]] == [
        (score.split, score.energy_mae) for score in evaluate(best)
    ]
    assert cli.main(["evaluate", str(best), "--split", "val_b"]) == 0
    table = capsys.readouterr().out
    assert "val_b" in table
    assert "val_a" not in table
    assert f"{rows[1]['energy_mae']:.4f}" in table

    assert cli.main(["predict", str(best), *map(str, STRUCTURES[:3])]) == 0
    table = capsys.readouterr().out
    predictor = Predictor.from_checkpoint(best)
    from molflt.data.structures import read_structures

    for path in STRUCTURES[:3]:
        [prediction] = predictor.predict(read_structures(path))
        [line] = [line for line in table.splitlines() if str(path) in line]
        for text in (prediction.formula, f"{prediction.energy:.4f}", prediction.tag_source):
            assert text in line


def test_predict_goes_on_after_a_bad_file(best, tmp_path, capsys):
    """Status 1, a line on stderr each, good files in the table, all in the output file."""
    (tmp_path / "broken.cif").write_text("data_\n_cell_length_a what\n")
    files = [
        str(STRUCTURES[0]),
        str(tmp_path / "broken.cif"),
        str(STRUCTURES[1]),
        str(tmp_path / "absent.xyz"),
    ]
    assert cli.main(["predict", best, *files]) == 1
    out, err = capsys.readouterr()
    assert [line.split(": ")[:2] for line in err.splitlines()] == [["molflt", "error"]] * 2
    assert "broken.cif" in err
    assert "absent.xyz" in err
    assert all(str(path) in out for path in STRUCTURES[:2])
    assert cli.main(["predict", best, *files, "--output", str(tmp_path / "out.csv")]) == 1
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == files
    assert [row["energy"] != "" for row in rows] == [True, False, True, False]
    assert [row["error"] != "" for row in rows] == [False, True, False, True]


def test_predict_without_a_single_good_file_is_bad_input(best, tmp_path, capsys):
    """Status 2 and no table."""
    assert cli.main(["predict", best, str(tmp_path / "absent.xyz")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1


def test_names_with_brackets_and_colons_are_printed_as_they_are(best, tmp_path, capsys):
    """Nothing in a file name is taken for markup."""
    name = tmp_path / "[bold]slab :gold:.cif"
    name.write_bytes(next(path for path in STRUCTURES if path.suffix == ".cif").read_bytes())
    assert cli.main(["predict", best, str(name)]) == 0
    assert "[bold]slab :gold:.cif" in capsys.readouterr().out


def test_data_commands_build_inspect_and_score(tmp_path, capsys):
    """A part of fcc111's source becomes a data set that can be inspected and scored."""
    source = json.loads((FCC111 / "source" / "fcc111_adsorption.json").read_text())
    (tmp_path / "part.json").write_text(json.dumps(source[::7]))
    root = tmp_path / "built"
    assert cli.main(["data", "build", "fcc111", str(tmp_path / "part.json"), str(root)]) == 0
    told = capsys.readouterr().out.splitlines()
    counts = {}
    for split in ("train", "val_id", "val_ood_ads", "val_ood_cat", "val_ood_both"):
        assert cli.main(["data", "inspect", str(root / split), "--json"]) == 0
        counts[split] = json.loads(capsys.readouterr().out)["records"]
    assert sum(counts.values()) == len(source[::7])
    files = {split: root / split / "data.0000.lmdb" for split in counts}
    assert sorted(told) == sorted(f"{files[split]}: {count} systems" for split, count in counts.items())
    assert cli.main(["data", "inspect", str(root / "train")]) == 0
    out = capsys.readouterr().out
    assert f"{counts['train']} records" in out
    assert "y_relaxed" in out
    assert cli.main(["data", "baseline", "fcc111", str(root), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["split"]: row["num_systems"] for row in rows} == {
        split: count for split, count in counts.items() if split != "train"
    }


def test_the_oc20_sample_is_built_where_asked(monkeypatch, tmp_path):
    """SOURCE and OUT arrive in this order."""
    calls = []
    monkeypatch.setattr(oc20_sample, "build_oc20_sample", lambda *paths: calls.append(paths) or tmp_path)
    assert cli.main(["data", "build", "oc20-sample", "source.pt", str(tmp_path)]) == 0
    assert calls == [("source.pt", str(tmp_path))]


BAD_INPUT = {
    "no command": ([], "COMMAND"),
    "unknown command": (["trian"], "invalid choice: 'trian'"),
    "no data command": (["data"], "molflt data --help"),
    "unknown option": (
        ["evaluate", "{best}", "--splits", "a"],
        "unknown argument --splits; the nearest valid one is --split; see molflt evaluate --help",
    ),
    "unknown option before the command": (
        ["--verson", "evaluate", "{best}"],
        "unknown argument --verson; the nearest valid one is --version; see molflt --help",
    ),
    "unknown option with a value": (
        ["bench", "attention", "--lenghts=64"],
        "--lenghts=64; the nearest valid one is --lengths; see molflt bench attention --help",
    ),
    "unknown option three levels down": (
        ["data", "baseline", "fcc111", "--jsn"],
        "unknown argument --jsn; the nearest valid one is --json; see molflt data baseline fcc111 --help",
    ),
    "unlike any option": (
        ["bench", "attention", "--zzz"],
        "unknown argument --zzz; see molflt bench attention --help",
    ),
    "a word too many": (["data", "inspect", "a", "b"], "unknown argument b; see molflt data inspect --help"),
    "a word too many beside settings": (
        ["train", "{tmp}/good.yaml", "b"],
        "unknown argument b; see molflt train --help",
    ),
    "no config": (["train", "{tmp}/absent.yaml"], "absent.yaml"),
    "broken config": (["train", "{tmp}/broken.yaml"], "is not valid YAML"),
    "unknown key": (["train", "{tmp}/unknown.yaml"], "the nearest valid one is optim.lr"),
    "unknown setting": (
        ["train", "{tmp}/good.yaml", "--optim.lrr", "1"],
        "the nearest valid one is --optim.lr",
    ),
    "wrong type": (["train", "{tmp}/good.yaml", "--training.epochs", "many"], "training.epochs"),
    "out of range": (["train", "{tmp}/good.yaml", "--model.num_heads", "3"], "a divisor of model.channels"),
    "no data": (["train", "{tmp}/good.yaml", "--data.root", "{tmp}/nowhere"], "nowhere does not exist"),
    "used folder": (["train", "{tmp}/good.yaml", "--training.output", "{tmp}"], "add --overwrite"),
    "no checkpoint": (["evaluate", "{tmp}/absent.ckpt"], "no checkpoint at"),
    "foreign checkpoint": (["predict", "{tmp}/good.yaml", "x.cif"], "is no checkpoint, or a cut one"),
    "unknown split": (["evaluate", "{best}", "--split", "test"], "it has train, val_a, val_b"),
    "no root": (["evaluate", "{best}", "--data", "{tmp}/nowhere"], "nowhere"),
    "bad number": (["evaluate", "{best}", "--batch-size", "0"], "must be at least 1"),
    "no structure": (["predict", "{best}", "{tmp}/absent.cif"], "absent.cif"),
    "unreadable structure": (["predict", "{best}", "{tmp}/good.yaml"], "good.yaml"),
    "unknown format": (
        ["predict", "{best}", "x.cif", "--output", "{tmp}/out.xls"],
        "end its name in .csv, .jsonl",
    ),
    "no source": (["data", "build", "fcc111", "{tmp}/absent.json", "{tmp}/out"], "absent.json"),
    "no LMDB": (["data", "inspect", "{tmp}/absent.lmdb"], "absent.lmdb"),
    "foreign LMDB": (["data", "inspect", "{tmp}/foreign.lmdb"], "foreign.lmdb"),
    "no baseline data": (["data", "baseline", "fcc111", "{tmp}/nowhere"], "nowhere does not exist"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_leaves_nothing(case, best, tiny_config, tmp_path, capfd):
    """Status 2, the cause in one line on stderr, nothing on stdout, no traceback, no file made or changed."""
    save_config(tiny_config(tmp_path / "run"), tmp_path / "good.yaml")
    (tmp_path / "broken.yaml").write_text("optim: {lr: [}")
    (tmp_path / "unknown.yaml").write_text("optim: {lrr: 1}")
    (tmp_path / "foreign.lmdb").write_bytes(b"no LMDB" * 1000)
    before = entries(tmp_path)
    words, message = BAD_INPUT[case]
    words = [word.format(tmp=tmp_path, best=best) for word in words]
    assert cli.main(words) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("molflt: error: ")
    assert message in err
    assert entries(tmp_path) == before


def test_a_file_whose_name_begins_with_a_dash_is_explained(tmp_path, monkeypatch, capsys):
    """A pattern that the shell expands may hold one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-a.xyz").touch()
    assert cli.main(["predict", "fcc111-flt", "-a.xyz", "b.xyz"]) == 2
    error = "unknown argument -a.xyz (the name of a file needs ./ before it); see molflt predict --help"
    assert capsys.readouterr().err == f"molflt: error: {error}\n"


def test_debug_shows_where_an_error_comes_from():
    """The exception is raised, wherever `--debug` stands."""
    for words in (["--debug", "train", "absent.yaml"], ["train", "absent.yaml", "--debug"]):
        with pytest.raises(InputError, match=r"absent\.yaml"):
            cli.main(words)


def test_a_file_that_fails_ends_in_one_line(monkeypatch, capsys):
    """Whatever part of the program it failed in; `--debug` shows which."""

    def full():
        raise OSError(errno.ENOSPC, "No space left on device", "run/versions.json")

    monkeypatch.setattr(cli, "make_parser", full)
    assert cli.main(["train"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("molflt: error: cannot read or write run/versions.json: No space left on device; ")
    assert err.count("\n") == 1
    with pytest.raises(OSError, match="No space left"):
        cli.main(["train", "--debug"])


def test_an_interrupt_exits_with_130(monkeypatch, capsys):
    """In one line."""

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "make_parser", interrupt)
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "molflt: interrupted\n"


def test_help_imports_no_torch():
    """Help of every level and errors in the arguments come before anything heavy is loaded."""
    code = """
import sys
from molflt import cli
for words in (["--help"], ["train", "--help"], ["predict", "--help"], ["data", "--help"], ["--version"]):
    assert cli.main(words) == 0
assert cli.main(["train", "absent.yaml"]) == 2
heavy = {"torch", "lightning", "ase", "pymatgen", "matplotlib", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert "--optim.lr" in result.stdout
    assert "Peak learning rate" in result.stdout


def test_the_program_exits_with_its_status():
    """`python -m molflt` in a process of its own: the status and the one line arrive."""
    words = [sys.executable, "-m", "molflt", "train", "absent.yaml"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("molflt: error: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_closed_pipe_is_no_error():
    """`molflt ... | head -0` ends quietly."""
    words = ["bash", "-c", f"{sys.executable} -m molflt train --help | true; echo ${{PIPESTATUS[0]}}"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert (result.stdout, result.stderr) == ("0\n", "")
