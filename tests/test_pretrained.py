"""Checkpoints that come with the package, by name: those that do, and with a stand-in for their folder."""

import json
import shutil
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

import molflt.pretrained
from molflt import cli
from molflt.checkpoint import load_checkpoint
from molflt.errors import InputError
from molflt.prediction import Predictor
from molflt.pretrained import pretrained_names

ROOT = Path(__file__).parents[1]
STRUCTURES = ROOT / "datasets" / "fcc111" / "structures"
SHIPPED = pretrained_names()


def test_the_fcc111_model_is_shipped():
    """The name that the documentation gives."""
    assert "fcc111-flt" in SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_checkpoint_is_small_and_nothing_but_weights_and_description(name):
    """Below 3 MB; the tensors of the network in float32; no training state, no path of a machine."""
    path = molflt.pretrained.FOLDER / f"{name}.ckpt"
    assert path.stat().st_size < 3e6
    content = torch.load(path, weights_only=True)
    assert content.keys() == {"state_dict", "molflt"}
    kinds = {value.dtype for value in content["state_dict"].values() if value.is_floating_point()}
    assert kinds == {torch.float32}
    config = content["molflt"]["config"]
    assert not Path(config["data"]["root"]).is_absolute()
    assert config["training"]["output"] == f"runs/{name}"


def test_the_shipped_model_predicts_what_it_did_where_it_was_made(capsys, tmp_path, monkeypatch):
    """Each structure of its data set that has a file, to the tolerance stated beside it, from any folder."""
    expected = json.loads((molflt.pretrained.FOLDER / "fcc111-flt.json").read_text(encoding="utf-8"))
    energies = expected["energies_eV"]
    assert expected["tolerance_eV"] <= 1e-3
    assert energies.keys() == {f"{path.name}:0" for path in STRUCTURES.iterdir()}
    monkeypatch.chdir(tmp_path)
    assert cli.main(["predict", "fcc111-flt", str(STRUCTURES), "--output", "out.jsonl"]) == 0
    rows = [json.loads(line) for line in Path("out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["id"]: row["energy"] for row in rows} == pytest.approx(energies, abs=expected["tolerance_eV"])
    assert {row["energy_meaning"] for row in rows} == {expected["energy_meaning"]}
    assert expected["domain"] in capsys.readouterr().err


def test_the_shipped_model_names_its_domain_every_time(capsys):
    """Below a table too, and what is outside is flagged: gold it has seen, iron it has not."""
    from ase.build import fcc111

    assert cli.main(["predict", "fcc111-flt", str(next(STRUCTURES.glob("Au-C*")))]) == 0
    out = capsys.readouterr().out
    assert "trained on" in out
    assert "not for other kinds of system" in out
    [row] = Predictor.from_checkpoint("fcc111-flt").predict([fcc111("Fe", (2, 2, 4), a=3.6, vacuum=7.0)])
    assert row.unlike_training
    assert "not in the training data: Fe" in row.notes


def test_package_data_name_every_file_beside_the_checkpoints():
    """So that a wheel has them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["molflt"]
    files = [path for path in molflt.pretrained.FOLDER.iterdir() if path.suffix in (".ckpt", ".json")]
    assert len(files) >= 2
    for path in files:
        assert any(fnmatch(f"pretrained/{path.name}", pattern) for pattern in patterns), path


@pytest.fixture
def shipped(finished_run, tmp_path, monkeypatch):
    """A folder with one checkpoint, `toy-flt`."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    shutil.copy(finished_run.best_checkpoint, folder / "toy-flt.ckpt")
    monkeypatch.setattr(molflt.pretrained, "FOLDER", folder)
    return folder


def test_a_shipped_checkpoint_loads_by_name(shipped, finished_run, tmp_path, monkeypatch):
    """From any working folder, in the loader and in the predictor."""
    monkeypatch.chdir(tmp_path)
    assert pretrained_names() == ["toy-flt"]
    assert load_checkpoint("toy-flt").metadata == load_checkpoint(finished_run.best_checkpoint).metadata
    assert Predictor.from_checkpoint("toy-flt").domain.startswith("trained on 11 systems")


def test_a_file_of_that_name_wins(shipped, tmp_path, monkeypatch):
    """What the user has is not replaced behind their back."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy-flt").write_bytes(b"mine")
    with pytest.raises(InputError, match="toy-flt is no checkpoint"):
        load_checkpoint("toy-flt")


def test_an_unknown_name_is_told_the_shipped_ones(shipped):
    """And only names without a path are looked up."""
    with pytest.raises(InputError, match=r"the name of a shipped one \(toy-flt\)"):
        load_checkpoint("toy-ftl")
    with pytest.raises(InputError, match="no checkpoint at"):
        load_checkpoint("./toy-flt")
