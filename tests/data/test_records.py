"""Raw records of any origin settle into the same sample, or are refused by name."""

import numpy as np
import pytest
import torch

from molflt.data.records import normalize_record, parse_sid
from molflt.errors import InputError
from molflt.testing import assert_same_sample, toy_record


def test_types_settle_whatever_the_record_held():
    record = toy_record(3)
    expected = normalize_record(record)
    arrays = {name: np.asarray(value, dtype=float) for name, value in record.items() if name != "sid"}
    arrays |= {"sid": "random1003", "cell": arrays["cell"][0], "natoms": np.int32(7)}
    assert_same_sample(normalize_record(arrays), expected)
    big_endian = {name: value.astype(">f8") if name == "pos" else value for name, value in arrays.items()}
    assert_same_sample(normalize_record(big_endian), expected)
    lists = {
        name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in record.items()
    }
    assert_same_sample(normalize_record(lists), expected)


def test_oc20s_records_repeat_in_all_directions_and_open_ones_in_none():
    assert normalize_record(toy_record()).pbc.tolist() == [[True, True, True]]
    open_record = {name: value for name, value in toy_record(edges=False).items() if name != "cell"}
    data = normalize_record(open_record)
    assert data.pbc.tolist() == [[False, False, False]]
    assert data.cell.tolist() == [[[0.0] * 3] * 3]


def test_what_is_absent_stays_absent_and_what_is_unknown_stays():
    data = normalize_record(toy_record(labels=False, tags=False, edges=False) | {"mystery": np.array([3, 5])})
    assert not {"tags", "y_relaxed", "y_init", "pos_relaxed", "edge_index", "distances"} & set(data.keys())
    assert data.mystery.tolist() == [3, 5]


def test_a_record_without_an_id_takes_the_given_one():
    record = {name: value for name, value in toy_record().items() if name not in ("sid", "natoms")}
    data = normalize_record(record, default_sid=17)
    assert (int(data.sid), int(data.natoms)) == (17, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pos": torch.zeros(6, 3)}, r"'pos' has shape \[6, 3\], expected \['A', 3\] = \[7, 3\]"),
        ({"pos": torch.zeros(3, 7)}, r"'pos' has shape \[3, 7\]"),
        ({"pos": torch.full((7, 3), float("nan"))}, "'pos' holds NaN or infinity"),
        ({"y_relaxed": float("nan")}, "'y_relaxed' holds NaN"),
        ({"y_relaxed": 1e300}, "'y_relaxed' holds NaN or infinity"),
        ({"tags": torch.full((7,), float("nan"))}, "'tags' holds values that are no torch.int64"),
        ({"y_relaxed": "-0.3"}, "'y_relaxed' holds a str, expected numbers"),
        ({"atomic_numbers": torch.zeros(7)}, "'atomic_numbers' holds 0; expected elements"),
        ({"atomic_numbers": torch.full((7,), 119)}, "'atomic_numbers' holds 119"),
        ({"atomic_numbers": torch.full((7,), 6.5)}, "'atomic_numbers' holds values that are no torch.int64"),
        ({"atomic_numbers": torch.zeros(0)}, "has no atoms"),
        ({"tags": torch.full((7,), 4)}, "'tags' holds 4; expected 0 subsurface"),
        ({"natoms": 6}, "says natoms = 6 and has 7 atoms"),
        ({"edge_index": torch.tensor([[0], [7]])}, "'cell_offsets' has shape"),
        ({"sid": "slab"}, "'sid' is 'slab', expected one integer"),
        ({"sid": 2**70}, "'sid' is"),
        ({"cell": torch.eye(2)}, "'cell' has shape"),
    ],
)
def test_a_wrong_value_is_refused_by_record_field_and_reason(change, message):
    with pytest.raises(InputError, match=rf"^record 3: {message}|^record 3 {message}"):
        normalize_record(toy_record() | change, "record 3")


def test_an_edge_to_an_atom_that_is_not_there_is_refused():
    record = toy_record()
    record["edge_index"] = record["edge_index"].clone()
    record["edge_index"][0, 0] = -1
    with pytest.raises(InputError, match="an edge to an atom that is not there"):
        normalize_record(record)


@pytest.mark.parametrize("name", ["pos", "atomic_numbers"])
def test_a_record_without_positions_or_elements_is_no_structure(name):
    record = {key: value for key, value in toy_record().items() if key != name}
    with pytest.raises(InputError, match=f"has no '{name}'"):
        normalize_record(record)


@pytest.mark.parametrize("value", [5, "5", "random5", 5.0, torch.tensor([5]), np.array([5]), np.int64(5)])
def test_an_id_reads_from_numbers_text_tensors_and_arrays(value):
    assert parse_sid(value) == 5


@pytest.mark.parametrize("value", ["", "x5", "5.0", None, 5.5, float("nan"), torch.tensor([5, 7]), b"5", [5]])
def test_what_is_no_id_is_refused(value):
    with pytest.raises(InputError, match="expected one integer"):
        parse_sid(value)


def test_an_id_of_many_lines_is_still_one_line_of_error():
    with pytest.raises(InputError, match=r"'sid' is \{'a': array\(\[\[0\.\].*expected one integer") as error:
        normalize_record(toy_record() | {"sid": {"a": np.zeros((99, 1))}})
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 150


@pytest.mark.parametrize("byte_order", ["<", ">"])
def test_a_users_array_of_either_byte_order_becomes_a_tensor(byte_order):
    array = np.array([0.5, -3.0], dtype=f"{byte_order}f8")
    kept = normalize_record(toy_record() | {"weights": array})["weights"]
    assert torch.equal(kept, torch.tensor([0.5, -3.0], dtype=torch.float64))


def test_a_users_array_of_numbers_that_torch_lacks_stays_an_array():
    array = np.array([0.5], dtype=np.longdouble)
    assert normalize_record(toy_record() | {"weights": array})["weights"].dtype == np.longdouble
