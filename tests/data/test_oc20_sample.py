"""The shipped OC20 systems are the genuine ones, laid out as OC20's own files are."""

import pickle
from pathlib import Path

import pytest
import torch

from molflt.data.datasets import OC20IS2RE
from molflt.data.lmdb import RecordReader
from molflt.data.lmdb_writer import write_lmdb
from molflt.data.oc20_sample import build_oc20_sample
from molflt.data.records import normalize_record
from molflt.errors import InputError
from molflt.testing import assert_edge_convention, assert_same_sample, toy_record

SHIPPED = Path(__file__).parents[2] / "datasets" / "oc20_sample"
SYSTEMS = {  # sid: atoms, edges, y_init, y_relaxed, as published
    2077917: (65, 2985, 9.2030, 0.8710),
    1302564: (172, 8225, 21.8289, 0.5880),
    1874170: (24, 386, 1.5960, -4.9180),
    2029193: (49, 1090, 1.6800, -1.1190),
    439115: (52, 2088, -0.4489, -3.4138),
    1278546: (54, 2399, 13.6340, 5.7224),
    1380110: (78, 2626, 5.2650, -3.2438),
    2188587: (93, 2348, 11.5618, 3.3971),
}
PYG_1_STATE = [
    "x",
    "edge_index",
    "edge_attr",
    "y",
    "pos",
    "normal",
    "face",
    "cell",
    "atomic_numbers",
    "natoms",
]


def as_raw(record: dict) -> dict:
    """A record with its numbers as tensors, as the source has them."""
    return {
        name: value if isinstance(value, torch.Tensor) else torch.tensor([value])
        for name, value in record.items()
    }


def test_the_eight_systems_are_there_with_their_sizes_and_energies():
    dataset = OC20IS2RE(SHIPPED)
    assert dataset.sids.tolist() == list(SYSTEMS)
    for data in dataset:
        atoms, edges, y_init, y_relaxed = SYSTEMS[int(data.sid)]
        assert (int(data.natoms), data.edge_index.shape[1]) == (atoms, edges)
        assert float(data.y_init) == pytest.approx(y_init, abs=1e-4)
        assert float(data.y_relaxed) == pytest.approx(y_relaxed, abs=1e-4)
        assert set(data.tags.tolist()) == {0, 1, 2}
        assert_edge_convention(data)


def test_the_bytes_are_laid_out_as_oc20s_own(tmp_path):
    reader = RecordReader(SHIPPED)
    assert [file.path.name for file in reader.files] == ["data.lmdb"]
    assert reader.files[0].pages.entries == 8  # no length
    data = pickle.loads(reader.files[0].read(0))
    assert list(data.__dict__)[:10] == PYG_1_STATE
    with pytest.raises(RuntimeError, match="older version"):
        _ = data.num_nodes
    types = {name: type(data.__dict__[name]) for name in ("natoms", "sid", "y_init", "y_relaxed")}
    assert types == {"natoms": int, "sid": int, "y_init": float, "y_relaxed": float}
    assert data.__dict__["atomic_numbers"].dtype == torch.float32
    assert list(data.__dict__["cell"].shape) == [1, 3, 3]


def test_the_shipped_file_is_what_its_own_records_build(tmp_path):
    reader = RecordReader(SHIPPED)
    source = tmp_path / "raw.pt"
    torch.save([as_raw(reader.read(index)[0]) for index in range(8)], source)
    built = build_oc20_sample(source, tmp_path / "out")
    assert built.read_bytes() == (SHIPPED / "data.lmdb").read_bytes()


def test_building_twice_gives_the_same_bytes_and_the_sources_values(tmp_path):
    raw = [as_raw(toy_record(seed)) for seed in range(3)]
    torch.save(raw, tmp_path / "raw.pt")
    first, second = (build_oc20_sample(tmp_path / "raw.pt", tmp_path / name) for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    for data, record in zip(OC20IS2RE(first), raw, strict=True):
        assert_same_sample(data, normalize_record(record))


def test_the_attribution_names_authors_source_and_licence():
    text = (SHIPPED / "README.md").read_text()
    for part in ("Chanussot", "10.1021/acscatal.0c04525", "CC-BY-4.0", "faenet", *map(str, SYSTEMS)):
        assert part in text


@pytest.mark.parametrize("content", ["missing", "text", "tensor", "invalid", "code"])
def test_a_source_that_is_not_one_is_named_and_nothing_is_written(tmp_path, content):
    source = tmp_path / "raw.pt"
    if content == "text":
        source.write_text("hello")
    elif content == "tensor":
        torch.save(torch.zeros(3), source)
    elif content == "invalid":
        torch.save([as_raw(toy_record()), as_raw(toy_record() | {"natoms": 3})], source)
    elif content == "code":
        torch.save([Path("x")], source)
    with pytest.raises(InputError, match=r"raw.pt"):
        build_oc20_sample(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_writing_the_records_of_a_pyg_1_file_in_pyg_2_layout_keeps_their_values(tmp_path):
    reader = RecordReader(SHIPPED)
    write_lmdb(tmp_path / "new.lmdb", [reader.read(index)[0] for index in range(8)])
    for new, old in zip(OC20IS2RE(tmp_path / "new.lmdb"), OC20IS2RE(SHIPPED), strict=True):
        assert_same_sample(new, old)
