"""The table of fields rules how samples batch."""

import pytest
import torch
from torch_geometric.data import Batch, Data

from molflt.data.fields import FIELDS, StructureData, check_same_fields
from molflt.data.records import normalize_record
from molflt.errors import InputError
from molflt.testing import assert_batch_holds, toy_records


def samples(count: int = 3, **fields: bool) -> list[StructureData]:
    return [normalize_record(record) for record in toy_records(count, **fields)]


def test_a_batch_takes_apart_into_its_samples():
    parts = samples()
    batch = Batch.from_data_list(parts)
    assert_batch_holds(batch, parts)
    assert batch.sid.tolist() == [1000, 1001, 1002]
    assert batch.batch.tolist() == [0] * 5 + [1] * 7 + [2] * 11


def test_only_edges_are_shifted_by_the_atoms_before_them():
    parts = samples()
    batch = Batch.from_data_list(parts)
    ends = [0, 5, 12]
    expected = torch.cat([part.edge_index + end for part, end in zip(parts, ends, strict=True)], dim=1)
    assert torch.equal(batch.edge_index, expected)
    assert torch.equal(batch.cell_offsets, torch.cat([part.cell_offsets for part in parts]))


@pytest.mark.parametrize("name", ["miller_index", "face_area", "batch_of_origin", "adsorbate_index"])
def test_a_users_field_is_not_shifted_by_pygs_name_rules(name):
    values = torch.tensor([[3, 1, 2]])
    parts = samples(2)
    for part in parts:
        part[name] = values
    assert torch.equal(Batch.from_data_list(parts)[name], values.repeat(2, 1))


def test_pygs_own_data_does_shift_such_a_field():
    parts = [Data(pos=torch.zeros(5, 3), miller_index=torch.tensor([[3, 1, 2]])) for _ in range(2)]
    assert Batch.from_data_list(parts).miller_index.tolist() != [[3, 1, 2], [3, 1, 2]]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_sparse_matrices_join_as_blocks_as_pyg_joins_them():
    parts = samples(2)
    for part in parts:
        part.adj = torch.eye(part.num_nodes).to_sparse()
    assert Batch.from_data_list(parts).adj.shape == (12, 12)


def test_each_field_of_the_table_has_the_shape_and_type_it_declares():
    data = samples(1)[0]
    sizes = {"A": 5, "E": data.edge_index.shape[1]}
    seen = set()
    for name, value in data.to_dict().items():
        spec = FIELDS[name]
        assert tuple(value.shape) == tuple(sizes.get(n, n) for n in spec.shape), name
        assert value.dtype == spec.dtype, name
        seen.add(name)
    assert set(FIELDS) - seen == {"delta_pos", "force"}


def test_samples_that_do_not_share_their_fields_are_refused_by_sid_and_field():
    mixed = [*samples(2), normalize_record(toy_records(1, first_seed=7, labels=False)[0])]
    with pytest.raises(InputError, match=r"sample 2 .*sid 1007.*pos_relaxed, y_init, y_relaxed"):
        check_same_fields(mixed)
    with pytest.raises(InputError, match=r"sample 1 .*sid 1000.*sid 1007"):
        check_same_fields(mixed[::-2])
    check_same_fields(mixed[:2])
    check_same_fields([])
