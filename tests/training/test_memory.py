"""Running out of memory names the batch and the setting to lower."""

import pytest
import torch

from molflt.errors import InputError
from molflt.models.graphormer3d import Graphormer3D
from molflt.training import train
from molflt.training.loaders import build_loader, prepared_samples
from molflt.training.memory import describe_out_of_memory, is_out_of_memory

ANEW = "in a new run (training.init_from starts it from this one's weights)"


def test_errors_of_either_allocator_are_recognised_and_others_are_not():
    """The CPU's is a plain RuntimeError; this one is its own."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize(
    ("settings", "knob"),
    [
        ({"data.batch_size": 11}, "data.batch_size = 11"),
        ({"data.max_atoms": 500}, "data.max_atoms = 500"),
        ({"data.max_edges": 90_000}, "data.max_edges = 90000"),
    ],
)
def test_the_line_names_systems_atoms_edges_sids_and_the_setting(tiny_config, tmp_path, settings, knob):
    """Of many sids the first eight; a lone system asks for something else than smaller batches."""
    config = tiny_config(tmp_path, **settings)
    samples = prepared_samples(config, "train")
    (batch,) = build_loader(samples, config, training=False)
    edges = sum(sample.edge_index.shape[1] for sample in samples)
    sids = batch.sid.tolist()
    assert describe_out_of_memory(batch, config.data) == (
        f"out of memory on a batch of 11 systems, 111 atoms and {edges} edges "
        f"(sids {', '.join(map(str, sids[:8]))} and 3 more); lower {knob} {ANEW}"
    )
    (alone,) = build_loader(samples[4:5], config, training=False)
    assert describe_out_of_memory(alone, config.data).startswith(
        "out of memory on a batch of 1 system, 17 atoms"
    )
    assert "(sids 1004); lower data.radius" in describe_out_of_memory(alone, config.data)
    assert describe_out_of_memory(None, config.data).endswith(f"--resume goes on, or {knob} {ANEW}")


@pytest.mark.parametrize("when", ["training", "validation"])
def test_a_run_that_ends_so_says_it_in_one_line(tiny_config, tmp_path, monkeypatch, when):
    """In a training step, or in the validation after it; another failure stays what it is."""
    forward = Graphormer3D.forward

    def hungry(self, batch):
        if self.training == (when == "training"):
            torch.empty(2**58)
        return forward(self, batch)

    monkeypatch.setattr(Graphormer3D, "forward", hungry)
    settings = {"training.epochs": 1, "data.batch_size": 3}
    with pytest.raises(
        InputError, match=r"out of memory on a batch of 3 systems.*data\.batch_size = 3 in a new run"
    ):
        train(tiny_config(tmp_path / "run", **settings), progress=False)

    def broken(self, batch):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(Graphormer3D, "forward", broken)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        train(tiny_config(tmp_path / "other", **settings), progress=False)
