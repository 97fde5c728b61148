"""Checkpoints that come with the package, by name: with a stand-in for its folder."""

import shutil

import pytest

import molflt.pretrained
from molflt.checkpoint import load_checkpoint
from molflt.errors import InputError
from molflt.prediction import Predictor
from molflt.pretrained import pretrained_names


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
