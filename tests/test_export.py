"""Exported checkpoints: the same predictions, and nothing of the training."""

import json

import pytest
import torch

from molflt import cli
from molflt.checkpoint import load_checkpoint, update_metadata
from molflt.config import config_from_dict, config_to_dict
from molflt.errors import InputError
from molflt.export import export_checkpoint, without_paths
from molflt.prediction import Predictor
from molflt.testing import write_toy_lmdb


@pytest.fixture
def structures(tmp_path):
    return str(write_toy_lmdb(tmp_path / "toys.lmdb", 3))


def test_an_exported_checkpoint_predicts_what_its_source_does(finished_run, structures, tmp_path, capsys):
    """The energies in the file beside it are those of both, and size and domain are printed."""
    source, target = finished_run.best_checkpoint, tmp_path / "toy.ckpt"
    assert cli.main(["export", str(source), str(target), "--structures", structures]) == 0
    out = capsys.readouterr().out
    assert f"{target.stat().st_size / 1e6:.2f} MB" in out
    assert "trained on 11 systems" in out
    expected = json.loads((tmp_path / "toy.json").read_text(encoding="utf-8"))
    assert list(expected["energies_eV"]) == [f"toys.lmdb:{frame}" for frame in range(3)]
    from molflt.prediction import iter_inputs

    for path in (source, target):
        rows = list(Predictor.from_checkpoint(path).iter_predict(iter_inputs([structures])))
        assert [row.energy for row in rows] == pytest.approx([*expected["energies_eV"].values()], abs=1e-6)


def test_nothing_of_the_training_is_exported(finished_run, tmp_path):
    """Weights, configuration and metadata as they were, without the optimiser and the run's folder."""
    done = export_checkpoint(finished_run.best_checkpoint, tmp_path / "toy.ckpt")
    before, after = load_checkpoint(finished_run.best_checkpoint), load_checkpoint(done.checkpoint)
    assert after.metadata == before.metadata
    assert after.config.model == before.config.model
    for name, value in before.model.state_dict().items():
        assert torch.equal(after.model.state_dict()[name], value), name
    assert done.expected is None
    assert [path.name for path in tmp_path.iterdir()] == ["toy.ckpt"]
    assert str(finished_run.output).encode() not in done.checkpoint.read_bytes()
    assert torch.load(done.checkpoint, weights_only=True).keys() == {"state_dict", "molflt"}


def test_what_can_not_be_exported_is_said(finished_run, structures, tmp_path):
    """Another suffix, no folder, no training domain, a structure that is refused; and nothing is written."""
    source = finished_run.best_checkpoint
    for target in (tmp_path / "toy.pt", tmp_path / "none" / "toy.ckpt"):
        with pytest.raises(InputError, match=r"a name that ends in \.ckpt"):
            export_checkpoint(source, target)
    with pytest.raises(InputError, match="does not exist"):
        export_checkpoint(source, tmp_path / "toy.ckpt", ["none.cif"])
    bare = tmp_path / "bare.ckpt"
    bare.write_bytes(source.read_bytes())
    update_metadata(bare, domain={})
    with pytest.raises(InputError, match="has no training domain"):
        export_checkpoint(bare, tmp_path / "toy.ckpt")
    own = tmp_path / "own.ckpt"
    own.write_bytes(source.read_bytes())
    for target, read in ((own, []), (tmp_path / "in.ckpt", [str(tmp_path / "in.json")])):
        with pytest.raises(InputError, match="would be replaced by the export"):
            export_checkpoint(own, target, read)
    assert own.read_bytes() == source.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare.ckpt", "own.ckpt", "toys.lmdb"]


@pytest.mark.parametrize(
    ("root", "kept"),
    [
        ("datasets/fcc111", "datasets/fcc111"),
        ("/home/zoe/slabs", "slabs"),
        ("../zoe/slabs", "slabs"),
        ("/", "data"),
    ],
)
def test_paths_of_the_training_are_not_exported(root, kept):
    """Data, start and run folder; the configuration stays valid."""
    training = {
        "output": "/home/zoe/run",
        "init_from": "/home/zoe/a.ckpt",
        "init_skip": ["head"],
        "wandb": "zoe",
    }
    config = config_from_dict({"data": {"root": root, "radius": 5.0}, "training": training})
    found = config_to_dict(without_paths(config, "toy"))
    assert config_to_dict(config_from_dict(found)) == found
    assert found["data"]["root"] == kept
    assert found["data"]["radius"] == 5.0
    assert found["training"]["output"] == "runs/toy"
    assert "zoe" not in str(found)


def test_equal_file_names_stay_apart(finished_run, tmp_path):
    """An energy each, by the folder that tells them apart; others by their name alone."""
    for name, count in (("a/x", 1), ("b/x", 2), ("b/y", 1)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_toy_lmdb(tmp_path / f"{name}.lmdb", count, first_seed=len(name) + count)
    done = export_checkpoint(
        finished_run.best_checkpoint, tmp_path / "toy.ckpt", [str(tmp_path / "a"), str(tmp_path / "b")]
    )
    assert done.expected is not None
    energies = json.loads(done.expected.read_text(encoding="utf-8"))["energies_eV"]
    assert list(energies) == ["a/x.lmdb:0", "b/x.lmdb:0", "b/x.lmdb:1", "y.lmdb:0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "toy.ckpt", "toy.json"]
