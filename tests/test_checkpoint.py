"""Checkpoints: an exact round trip, one clear error for every file that is none, and nothing executed."""

import errno
import io
import os
import pickle
import random
import zipfile

import pytest
import torch

from molflt import checkpoint as module
from molflt.build import build_dataset
from molflt.checkpoint import (
    Checkpoint,
    CheckpointMetadata,
    load_checkpoint,
    model_from_config,
    save_checkpoint,
    update_metadata,
)
from molflt.errors import InputError


@pytest.fixture
def saved(tiny_config, toy_root, tmp_path):
    """An untrained checkpoint and the file it was saved to."""
    torch.manual_seed(11)
    config = tiny_config(tmp_path / "run", **{"data.root": toy_root, "optim.delta_pos_weight": "[2, 1]"})
    model = model_from_config(config).eval()
    model.energy_mean.fill_(-2.5)
    metadata = CheckpointMetadata(
        energy_meaning="of a toy",
        splits={"train": 11},
        elements=[1, 29],
        val_metrics={"val_a/energy_mae": 1 / 3},
    )
    checkpoint = Checkpoint(config, model, metadata)
    save_checkpoint(tmp_path / "model.ckpt", checkpoint)
    return checkpoint, tmp_path / "model.ckpt"


def rewrite(path, change):
    """Load the file's content, change it, write it back."""
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def test_round_trip_is_bit_identical(saved):
    """Weights, buffers, configuration and metadata come back, and predictions are the same bits."""
    checkpoint, path = saved
    again = load_checkpoint(path)
    before, after = checkpoint.model.state_dict(), again.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert again.config == checkpoint.config
    assert again.metadata == checkpoint.metadata
    assert not again.model.training
    sample = build_dataset(checkpoint.config.data, "val_a")[0]
    with torch.inference_mode():
        assert torch.equal(checkpoint.model(sample).energy, again.model(sample).energy)


def test_loading_leaves_the_random_state_alone(saved):
    """The network is initialised before its weights are read, from a state of its own."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    load_checkpoint(saved[1])
    assert torch.equal(torch.rand(3), expected)


def test_a_finished_runs_checkpoint_is_plain_data(finished_run):
    """Lightning's file, too, names no class but torch's own storages."""
    with zipfile.ZipFile(finished_run.last_checkpoint) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("data.pkl")]
        opcodes = list(_global_names(archive.read(name)))
    assert opcodes
    assert {module for module, _ in opcodes} <= {"torch", "torch._utils", "collections"}


def _global_names(blob):
    import pickletools

    for opcode, argument, _ in pickletools.genops(blob):
        if opcode.name == "GLOBAL":
            yield argument.split(" ")
        assert opcode.name != "STACK_GLOBAL"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.unlink(), "no checkpoint at .*give a file that `molflt train` wrote"),
        (lambda path: (path.unlink(), path.mkdir()), "is a folder; give a checkpoint file"),
        (lambda path: path.write_bytes(b""), "is no checkpoint, or a cut one"),
        (lambda path: path.write_text("CRYST1 1.0"), "is no checkpoint, or a cut one"),
        (lambda path: path.write_bytes(pickle.dumps({"molflt": 1})), "is no checkpoint, or a cut one"),
        (lambda path: torch.save({"state_dict": {}}, path), "is no molflt checkpoint"),
        (lambda path: torch.save([1, 2], path), "is no molflt checkpoint"),
        (lambda path: torch.save({"molflt": {"format": "molflt-checkpoint"}}, path), "is a damaged molflt"),
    ],
)
def test_what_is_no_checkpoint_is_one_clear_error(saved, make, message):
    """Missing, a folder, empty, text, an old pickle, other people's torch files."""
    _, path = saved
    make(path)
    with pytest.raises(InputError, match=message) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_cut_anywhere_is_refused(saved):
    """At 40 lengths from nothing to one byte short."""
    _, path = saved
    whole = path.read_bytes()
    generator = random.Random(0)
    for length in [0, 1, 4, len(whole) - 1, *(generator.randrange(len(whole)) for _ in range(36))]:
        path.write_bytes(whole[:length])
        with pytest.raises(InputError):
            load_checkpoint(path)


def test_a_flipped_bit_is_refused_or_harmless(saved):
    """Each of 120 single-bit changes raises InputError or lies outside of what is read."""
    checkpoint, path = saved
    whole = bytearray(path.read_bytes())
    expected = checkpoint.model.state_dict()
    generator = random.Random(1)
    refused = 0
    for _ in range(120):
        position, bit = generator.randrange(len(whole)), generator.randrange(8)
        whole[position] ^= 1 << bit
        path.write_bytes(whole)
        whole[position] ^= 1 << bit
        try:
            loaded = load_checkpoint(path)
        except InputError:
            refused += 1
        else:
            state = loaded.model.state_dict()
            assert all(torch.equal(state[name], expected[name]) for name in expected)
            assert loaded.config == checkpoint.config
    assert refused > 60


def test_a_checkpoint_of_a_newer_format_says_which_version_wrote_it(saved):
    """And that upgrading is the remedy."""
    _, path = saved

    def change(content):
        content["molflt"]["version"] = 2
        content["molflt"]["metadata"]["molflt_version"] = "9.8.7"
        content["molflt"]["config"]["model"]["unheard_of"] = 1

    rewrite(path, change)
    with pytest.raises(InputError, match=r"written by molflt 9\.8\.7 in format 2.*upgrade molflt"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["state_dict"].popitem(), "do not fit its configuration"),
        (lambda c: c["state_dict"].update({"model.more": torch.ones(1)}), r"first at more"),
        (lambda c: c["state_dict"].update({"model.energy_mean": torch.ones(2)}), r"first at energy_mean"),
        (lambda c: c.pop("state_dict"), "do not fit its configuration"),
        (lambda c: c["molflt"]["config"]["optim"].update(lrr=1), "unknown key optim.lrr"),
        (lambda c: c["molflt"]["metadata"].pop("elements"), r"damaged metadata \(elements\)"),
    ],
)
def test_content_that_does_not_fit_is_named(saved, change, message):
    """A missing, additional or misshapen weight, an unknown setting, missing metadata."""
    _, path = saved
    rewrite(path, change)
    with pytest.raises(InputError, match=message):
        load_checkpoint(path)


class Payload:
    """Runs a command where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_nothing_in_a_file_is_executed(saved, tmp_path):
    """A payload beside the weights is refused, and has not run."""
    _, path = saved
    content = torch.load(path, weights_only=True)
    torch.save(content | {"more": Payload(tmp_path / "executed")}, path)
    with pytest.raises(InputError):
        load_checkpoint(path)
    assert not (tmp_path / "executed").exists()
    stream = io.BytesIO()
    torch.save(Payload(tmp_path / "executed"), stream)
    torch.load(io.BytesIO(stream.getvalue()), weights_only=False)
    assert (tmp_path / "executed").exists(), "the payload works where it is let"


def test_a_failed_write_leaves_the_old_file_and_no_other(saved, monkeypatch):
    """The new checkpoint takes the name only when it is whole."""
    checkpoint, path = saved
    before = path.read_bytes()

    write = module._Sink.write
    written = 0

    def fail(self, data):
        nonlocal written
        written += len(data)
        if written > 1000:
            self.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise self.error
        return write(self, data)

    monkeypatch.setattr(module._Sink, "write", fail)
    with pytest.raises(InputError, match=r"cannot write .*: No space left on device, the one written before"):
        save_checkpoint(path, checkpoint)
    assert written > 1000
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["model.ckpt"]


def test_a_file_from_before_the_training_domain_still_loads(saved):
    """Metadata without the later entry read as if it were empty."""
    checkpoint, path = saved
    rewrite(path, lambda content: content["molflt"]["metadata"].pop("domain"))
    assert load_checkpoint(path).metadata == checkpoint.metadata
    assert checkpoint.metadata.domain == {}


def test_metadata_can_be_replaced_in_a_file(saved):
    """Weights, configuration, other metadata and what else the file holds stay as they were."""
    _, path = saved
    rewrite(path, lambda content: content.update(epoch=7))
    content = torch.load(path, weights_only=True)
    update_metadata(path, domain={"mean": [1.5]})
    changed = torch.load(path, weights_only=True)
    assert changed["molflt"]["metadata"].pop("domain") == {"mean": [1.5]}
    assert content["molflt"]["metadata"].pop("domain") == {}
    assert changed["molflt"] == content["molflt"]
    assert changed["epoch"] == 7
    assert changed["state_dict"].keys() == content["state_dict"].keys()
    for name, value in content["state_dict"].items():
        assert torch.equal(changed["state_dict"][name], value)
