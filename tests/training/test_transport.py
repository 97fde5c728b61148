"""Tensors that go as one and come out as they were."""

import pickle

import torch
from torch_geometric.data import Batch

from molflt.data.fields import StructureData
from molflt.training.transport import Collate, InOnePiece, packed, unpacked

TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 3, dtype=torch.float64),
    "numbers": torch.arange(35).reshape(5, 7).T,
    "one": torch.tensor(-1.5, dtype=torch.float64),
    "half": torch.randn(11, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "offsets": torch.tensor([[-1, 2, 3]], dtype=torch.int8),
}


def test_tensors_of_any_shape_and_type_come_out_as_they_went_in():
    """Bit by bit, none over another, the transposed one too."""
    buffer, places = packed(TENSORS)
    views = unpacked(buffer, places)
    assert list(views) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert views[name].dtype == tensor.dtype
        assert torch.equal(views[name], tensor), name
        assert views[name].is_contiguous()


def test_nothing_to_pack_is_no_obstacle():
    """A buffer of no bytes."""
    assert unpacked(*packed({})) == {}


def test_a_batch_arrives_as_itself_with_what_is_no_tensor():
    """Its class, counts and words; the one that was sent keeps its tensors."""
    samples = [StructureData(pos=torch.ones(n, 3), name=f"system {n}", num_nodes=n) for n in (2, 5)]
    batch = Collate(Batch.from_data_list)(samples)
    assert isinstance(batch, StructureData)
    arrived = pickle.loads(pickle.dumps(InOnePiece(batch)))
    assert type(arrived) is type(batch)
    assert arrived.num_graphs == 2
    assert arrived.name == ["system 2", "system 5"]
    assert arrived.batch.tolist() == batch.batch.tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert torch.equal(arrived.pos, torch.ones(7, 3))
