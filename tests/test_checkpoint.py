"""Checkpoints: an exact round trip, one clear error for every file that is none, and nothing executed."""

import errno
import io
import os
import pickle
import random
import zipfile
from dataclasses import replace

import pytest
import torch

from molflt import archive
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
        (
            lambda c: c["state_dict"].update({"model.energy_mean": torch.tensor(1j)}),
            r"first at energy_mean",
        ),
        (
            lambda c: c["state_dict"].update({"model.energy_mean": torch.tensor(1.0, device="meta")}),
            r"first at energy_mean",
        ),
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


VAST = [
    {"num_layers": 2**31},
    {"num_layers": 2**62},
    {"num_blocks": 2**31},
    {"channels": 2 * 10**9, "displacement_channels": 4},
    {"channels": 30_000},
    {"channels": 30_000, "ffn_channels": 2**40},
    {"ffn_channels": 10**12},
    {"num_gaussians": 10**9},
    {"displacement_channels": 10**10},
    {"num_heads": 2**30, "channels": 2**30, "displacement_channels": 2**30},
    {"attention": {"num_random_features": 10**9}},
    {"attention": {"num_frequencies": 10**9}},
    {"attention": {"num_basis": 10**12}},
    {"attention": {"kind": "softmax", "num_basis": 20_000}},
]


@pytest.mark.parametrize("sizes", VAST)
def test_a_configuration_of_a_vast_network_is_refused_before_it_is_built(saved, sizes):
    """Whatever size is out of proportion to the weights in the file; no tensor of that size is asked for."""
    _, path = saved

    def change(content):
        model = content["molflt"]["config"]["model"]
        model["attention"].update(sizes.get("attention", {}))
        model.update({name: size for name, size in sizes.items() if name != "attention"})

    rewrite(path, change)
    with pytest.raises(InputError, match=r"do not fit its configuration|must be at most 1000") as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_a_vast_network_cannot_be_claimed_by_tensors_that_hold_nothing(saved):
    """A single stored number, expanded to a vector of 10^9, or a tensor without storage, counts as such."""
    _, path = saved

    def change(content):
        content["molflt"]["config"]["model"].update(ffn_channels=10**9)
        content["state_dict"]["model.more"] = torch.zeros(1).expand(10**9)
        content["state_dict"]["model.meta"] = torch.zeros(10**9, device="meta")

    rewrite(path, change)
    with pytest.raises(InputError, match="needs more numbers than it holds"):
        load_checkpoint(path)


HOSTILE_METADATA = [
    ("molflt_version", 3),
    ("energy_meaning", None),
    ("energy_meaning", ["a"]),
    ("splits", [1]),
    ("splits", {"train": "many"}),
    ("elements", "Cu"),
    ("elements", [1.5]),
    ("elements", [0]),
    ("elements", [119]),
    ("elements", [True]),
    ("num_atoms_range", [3]),
    ("num_atoms_range", [7, 5]),
    ("num_atoms_range", {"a": 1}),
    ("energy_mean", "0"),
    ("epoch", 1.5),
    ("val_metrics", {"mae": []}),
    ("domain", []),
    ("domain", {"mean": [1.0]}),
]


@pytest.mark.parametrize(("name", "value"), HOSTILE_METADATA)
def test_metadata_of_another_type_are_named(saved, name, value):
    """Every entry is of its own type, and atomic numbers and sizes are possible ones."""
    _, path = saved
    rewrite(path, lambda content: content["molflt"]["metadata"].update({name: value}))
    with pytest.raises(InputError, match=rf"damaged metadata \({name}\)"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda domain: domain.update(mean=domain["mean"][:-1]),
        lambda domain: domain.update(mean=domain["mean"] + [0.0]),
        lambda domain: domain.update(mean=["x"] * len(domain["mean"])),
        lambda domain: domain["directions"].pop(),
        lambda domain: domain.update(variances=[0.0] * len(domain["variances"])),
        lambda domain: domain.update(rest_variance=float("nan")),
        lambda domain: domain.update(distance_limit="far"),
        lambda domain: domain.update(shares={"Xx": [0.0, 1.0]}),
        lambda domain: domain.update(shares={"Cu": [1.0]}),
        lambda domain: domain.update(
            mean=[*domain["mean"], 0.0], directions=[[*row, 0.0] for row in domain["directions"]]
        ),
    ],
)
def test_a_training_domain_that_does_not_fit_together_is_refused(finished_run, tmp_path, spoil):
    """Lists of other lengths or types, variances that divide by zero, a width that is not the network's."""
    path = tmp_path / "model.ckpt"
    path.write_bytes(finished_run.last_checkpoint.read_bytes())
    load_checkpoint(path)
    rewrite(path, lambda content: spoil(content["molflt"]["metadata"]["domain"]))
    with pytest.raises(InputError, match=r"damaged metadata \(domain\)"):
        load_checkpoint(path)


def nested(depth, width):
    """A list of lists of lists, in which each level refers `width` times to one and the same list."""
    value = [1]
    for _ in range(depth):
        value = [value] * width
    return value


@pytest.mark.parametrize(
    "value",
    [nested(12, 100), nested(100, 1), {1: 2}, torch.ones(1), 10**30, "x" * 10**6, [b"bytes"]],
    ids=["laughs", "deep", "key", "tensor", "integer", "text", "bytes"],
)
@pytest.mark.parametrize("place", ["config", "metadata", "version"])
def test_a_description_that_never_ends_or_is_not_plain_is_refused(saved, value, place):
    """10^24 values in a file of a few bytes, and types that no description has."""
    _, path = saved
    rewrite(path, lambda content: content["molflt"].update({place: value}))
    with pytest.raises(InputError, match="is a damaged molflt checkpoint") as caught:
        load_checkpoint(path)
    assert len(str(caught.value)) < 500


def test_a_refused_configuration_is_not_quoted_at_length(saved):
    """However long the value that is wrong with it."""
    _, path = saved
    rewrite(path, lambda content: content["molflt"]["config"]["data"].update(radius=["wrong"] * 10_000))
    with pytest.raises(InputError, match=r"its configuration.*radius") as caught:
        load_checkpoint(path)
    assert len(str(caught.value)) < 2_000


def test_an_archive_that_unpacks_to_more_than_it_is_is_refused(saved):
    """torch.save compresses nothing; a compressed copy of its file would read the same."""
    _, path = saved
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    assert torch.load(path, weights_only=True)["molflt"]["version"] == 1
    with pytest.raises(InputError, match=r"is no archive as torch\.save writes it"):
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

    write = archive._Sink.write
    written = 0

    def fail(self, data):
        nonlocal written
        written += len(data)
        if written > 1000:
            self.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise self.error
        return write(self, data)

    monkeypatch.setattr(archive._Sink, "write", fail)
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


def test_tensors_saved_on_a_gpu_load_on_the_cpu(saved, tmp_path):
    """Each storage says `cuda:0` as its place, as in a file that was written from there."""
    checkpoint, path = saved
    # Else the pickle has one text for the setting and for the place.
    training = replace(checkpoint.config.training, accelerator="auto")
    save_checkpoint(path, replace(checkpoint, config=replace(checkpoint.config, training=training)))
    moved = tmp_path / "cuda.ckpt"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(moved, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("/data.pkl"):
                # The place is a text before the count of numbers; later storages refer to the first one's.
                start = content.index(b"X\x03\0\0\0cpuq")
                content = content[:start] + b"X\x06\0\0\0cuda:0" + content[start + 8 :]
            target.writestr(name, content)
    tags = []
    torch.load(moved, weights_only=True, map_location=lambda storage, tag: tags.append(tag) or storage)
    assert {*tags} == {"cuda:0"}
    found = load_checkpoint(moved).model.state_dict()
    assert all(value.device.type == "cpu" for value in found.values())
    assert all(torch.equal(value, found[name]) for name, value in checkpoint.model.state_dict().items())
