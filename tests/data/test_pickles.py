"""Records unpickle to their values whatever wrote them, and nothing else in them ever runs."""

import io
import os
import pickle
import random
import shutil
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from molflt.data.pickle_machine import PickleError, read_pickle
from molflt.data.pickle_writer import dump_int, dump_record
from molflt.data.pickles import load_record, peek_record
from molflt.data.records import normalize_record
from molflt.data.torch_stream import HEAD, STORAGE_DTYPES, read_storage
from molflt.errors import InputError
from molflt.testing import toy_record


def assert_same_fields(fields, expected):
    assert set(fields) == set(expected)
    for name, value in expected.items():
        if isinstance(value, (Tensor, np.ndarray)):
            assert type(fields[name]) is type(value), name
            assert fields[name].dtype == value.dtype, name
            equal = torch.equal if isinstance(value, Tensor) else np.array_equal
            assert equal(fields[name], value), name
        else:
            assert fields[name] == value, name


# What other tools write


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pyg_2_data_reads_from_every_pickle_protocol(protocol):
    record = toy_record(1)
    assert_same_fields(load_record(pickle.dumps(Data.from_dict(record), protocol)), record)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pyg_1_data_reads_though_pyg_2_cannot_use_it(protocol):
    record = toy_record(1)
    old = Data.__new__(Data)
    old.__dict__.update({"x": None, "face": None} | record)
    blob = pickle.dumps(old, protocol)
    with pytest.raises(RuntimeError, match="older version"):
        _ = pickle.loads(blob).num_nodes
    assert_same_fields(load_record(blob), record)


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("core", ["numpy.core", "numpy._core"])
def test_numpy_1_and_2_arrays_and_scalars_read(protocol, core):
    fields = {
        "plain": np.arange(15.0).reshape(3, 5),
        "fortran": np.asfortranarray(np.arange(15, dtype=np.int32).reshape(3, 5)),
        "sliced": np.arange(30.0)[::2],
        "big_endian": np.arange(5, dtype=">i4"),
        "flags": np.array([True, False, True]),
        "names": np.array(["Pt", "C"]),
        "empty": np.zeros((0, 3), dtype=np.float32),
        "single": np.array(2.5),
        "energy": np.float64(-0.7),
        "count": np.int64(17),
    }
    assert_same_fields(load_record(_as_if_from(core, pickle.dumps(fields, protocol))), fields)


def _as_if_from(core: str, blob: bytes) -> bytes:
    """Rename NumPy's core module as a pickle names it, with the lengths before the names."""
    for module in ("multiarray", "numeric"):
        for package in ("numpy.core", "numpy._core"):
            old, new = f"{package}.{module}".encode(), f"{core}.{module}".encode()
            blob = blob.replace(b"c" + old + b"\n", b"c" + new + b"\n")
            blob = blob.replace(b"\x8c" + bytes([len(old)]) + old, b"\x8c" + bytes([len(new)]) + new)
    return (
        blob.replace(blob[2:11], b"", 1) if blob[2:3] == b"\x95" else blob
    )  # the frame's length has changed


def test_the_renaming_above_does_rename():
    blob = pickle.dumps(np.float64(1.0), 4)
    assert b"numpy.core." in _as_if_from("numpy.core", blob)
    assert b"numpy._core." in _as_if_from("numpy._core", blob)


@pytest.mark.parametrize("dtype", STORAGE_DTYPES.values())
def test_every_tensor_type_survives_with_its_layout(dtype):
    values = torch.arange(24).reshape(2, 3, 4).remainder(3).to(dtype)
    shared = values.flatten()
    fields = {
        "whole": values,
        "transposed": values.permute(2, 0, 1),
        "tail": shared[5:],
        "every_third": shared[::3],
        "expanded": values[:1, :1, :1].expand(3, 5, 7),
        "scalar": values[1, 2, 3],
        "empty": values[:0],
    }
    assert_same_fields(load_record(pickle.dumps(fields)), fields)
    assert_same_fields(load_record(dump_record(fields)), fields)


def test_ordered_dicts_lists_and_texts_read():
    fields = {
        "meta": OrderedDict(a=1, b=[2.5, "x"]),
        "note": "Ångström",
        "big": 2**70,
        "none": None,
        "low": -3,
    }
    assert load_record(pickle.dumps(fields)) == {
        name: value for name, value in fields.items() if name != "none"
    }
    assert load_record(pickle.dumps(fields, 2))["meta"] == fields["meta"]


def test_peeking_gives_shapes_and_id_without_decoding_tensors():
    record = toy_record(4, num_atoms=11) | {"array": np.zeros((3, 2)), "sid": torch.tensor([41])}
    for blob in (
        pickle.dumps(Data.from_dict(record)),
        pickle.dumps(record, 4),
        dump_record(record | {"array": 0}),
    ):
        shapes, sid = peek_record(blob)
        assert int(sid) == 41
        assert shapes["pos"] == (11, 3)
        assert shapes["edge_index"] == tuple(record["edge_index"].shape)
        assert shapes["natoms"] == ()
        assert shapes["array"] in ((3, 2), ())
    assert peek_record(pickle.dumps({"pos": [[0.0, 0.0, 0.0]]})) == ({"pos": (1, 3)}, None)


# What we write


@pytest.mark.parametrize("layout", ["pyg1", "pyg2"])
def test_written_records_are_the_same_bytes_each_time_and_read_back(layout):
    record = toy_record(2) | {"note": "x" * 300, "flag": True, "big": 2**40, "low": -(2**40), "half": None}
    blob = dump_record(record, layout)
    copied = {name: value.clone() if isinstance(value, Tensor) else value for name, value in record.items()}
    assert dump_record(copied, layout) == blob
    assert_same_fields(
        load_record(blob), {name: value for name, value in record.items() if value is not None}
    )


def test_written_pyg_2_records_are_data_to_pickle_itself():
    record = toy_record(2)
    data = pickle.loads(dump_record(record, "pyg2"))
    assert type(data) is Data
    assert_same_fields(data.to_dict(), record)
    assert Batch.from_data_list([data, data]).natoms.tolist() == [7, 7]


def test_written_pyg_1_records_have_that_versions_flat_state():
    record = toy_record(2)
    data = pickle.loads(dump_record(record, "pyg1"))
    leading = ["x", "edge_index", "edge_attr", "y", "pos", "normal", "face"]
    assert list(data.__dict__)[:7] == leading
    assert data.__dict__["normal"] is None
    assert_same_fields({name: data.__dict__[name] for name in record}, record)


def test_a_written_length_is_an_int_to_pickle_itself():
    for number in (0, 255, 256, 460_328, 2**33):
        assert pickle.loads(dump_int(number)) == number


@pytest.mark.parametrize(
    "value", [np.zeros(3), torch.zeros(3, dtype=torch.complex64), [1], torch.eye(3).to_sparse()]
)
def test_a_field_that_has_no_place_in_a_record_is_refused_by_name(value):
    with pytest.raises(TypeError, match="field 'odd' holds a"):
        dump_record({"odd": value})


# What must not run


class Payload:
    """Pickles as a call of `function(*args)`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, "(posix|nt).system"),
        (eval, "(builtins|__builtin__).eval"),
        (getattr, "(builtins|__builtin__).getattr"),
        (shutil.rmtree, "shutil.(rmtree|_RmtreeType)"),
        (torch.load, "torch.serialization.load"),
        (np.load, "numpy.load"),
    ],
)
def test_a_payload_is_refused_by_name_and_does_not_run(tmp_path, protocol, function, name):
    made = tmp_path / "made"
    blob = pickle.dumps(toy_record() | {"note": Payload(function, f"touch {made}")}, protocol)
    with pytest.raises(InputError, match=rf"record 3 names {name},.*nothing of it was run"):
        load_record(blob, "record 3")
    with pytest.raises(InputError, match=name):
        peek_record(blob)
    assert not made.exists()


def test_the_payload_of_these_tests_would_run(tmp_path):
    made = tmp_path / "made"
    pickle.loads(pickle.dumps(Payload(os.system, f"touch '{made}'")))
    assert made.exists()


def test_a_payload_inside_a_tensors_storage_does_not_run(tmp_path):
    made = tmp_path / "made"
    stream = io.BytesIO()
    torch.save(Payload(os.system, f"touch {made}"), stream, _use_new_zipfile_serialization=False)
    record = {"pos": Payload(torch.storage._load_from_bytes, stream.getvalue())}
    with pytest.raises(InputError, match=r"names (posix|nt)\.system"):
        load_record(pickle.dumps(record))
    assert not made.exists()


@pytest.mark.parametrize("call", [Batch, print, dict, torch.Size, pickle.loads])
def test_even_harmless_names_outside_the_list_are_refused(call):
    with pytest.raises(InputError, match=f"names .*{call.__name__},"):
        load_record(pickle.dumps({"pos": Payload(call)}))


def test_a_refused_name_is_printed_on_one_line_without_terminal_codes():
    blob = b"\x80\x04\x8c\x01a\x8c\x09\x1b[2J\nx\ry\x07\x93."
    with pytest.raises(InputError) as error:
        load_record(blob)
    assert str(error.value).isprintable()
    assert r"\x1b[2J\nx" in str(error.value)
    with pytest.raises(InputError) as error:
        load_record(b"\x80\x04X\xff\xff\x00\x00" + b"a" * 65535 + b"\x8c\x01b\x93.")
    assert len(str(error.value)) < 500


def test_allowed_names_cannot_be_called_into_something_else():
    for blob in (
        pickle.dumps({"pos": Data}),  # a class and not an object
        pickle.dumps({"pos": np.ndarray}),
        pickle.dumps({"pos": {"nested": Data(x=torch.zeros(3))}}),
        b"\x80\x04]\x8c\x01xb.",  # state for a list
        b"\x80\x04\x8c\x01x)R.",  # call of a text
        b"\x80\x04ccollections\nOrderedDict\n\x8c\x01x\x85R.",  # a dict from a text
        b"\x80\x04}]K\x01s.",  # a list as a key
        b"\x80\x04}\x8c\x01ac_codecs\nencode\nK\x01\x8c\x06latin1\x86Rs.",  # an encoded number
        b"\x80\x04i.",  # an instruction that imports, of protocol 0
    ):
        with pytest.raises(InputError, match="cannot be unpickled"):
            load_record(blob)


def test_object_arrays_are_refused():
    with pytest.raises(InputError, match="dtype 'O8'"):
        load_record(pickle.dumps({"pos": np.array([{}, None], dtype=object)}))


# What is damaged or built to exhaust


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\x80",
        b"hello",
        b"\x80\x04N.",
        pickle.dumps([1, 2]),
        pickle.dumps({1: 2}),
        b"\x80\x04" + b"]\x94" * 5 + b"a" * 9 + b".",
        b"\x80\x04\x8e" + (2**62).to_bytes(8, "little") + b".",  # bytes of 4 EiB
        b"\x80\x04\x96" + (2**40).to_bytes(8, "little") + b".",  # a bytearray of 1 TiB
        b"\x80\x04}r\xff\xff\xff\xff" * 3,  # a memo of 4 billion entries, cut short
        b"\x80\x04}\x8c\x01a" + b")" + b"\x85" * 100_000 + b"s.",  # 100,000 tuples deep
        b"\x80\x04}(" + b")" + b"\x85" * 100_000 + b"Nu.",  # the same as a key
        b"\x80\x04(((ttt.",  # more tuples than marks hold
        b"\x80\x04}\x8c\x01a(\x8c\x01b0tu.",
    ],
)
def test_damage_and_excess_end_in_one_clear_error(blob):
    with pytest.raises(InputError, match="cannot be unpickled"):
        load_record(blob)


def test_shared_parts_are_resolved_once_and_loops_end():
    lists = [[]]
    for _ in range(64):  # 2^64 leaves, 65 lists
        lists.append([lists[-1], lists[-1]])
    value = load_record(pickle.dumps({"a": lists[-1]}))["a"]
    assert value[0] is value[1]
    loop: list = [1]
    loop.append(loop)
    assert load_record(pickle.dumps({"a": loop})) == {"a": [1, None]}


def tensor_pickle(offset=0, size=(3,), stride=(1,), stream=None) -> bytes:
    storage = _stream(torch.arange(3.0)) if stream is None else stream
    call = Payload(
        torch._utils._rebuild_tensor_v2,
        Payload(torch.storage._load_from_bytes, storage),
        offset,
        size,
        stride,
        False,
        OrderedDict(),
    )
    return pickle.dumps({"pos": call})


def _stream(values: Tensor) -> bytes:
    stream = io.BytesIO()
    typed = torch.storage.TypedStorage(
        wrap_storage=values.untyped_storage(), dtype=values.dtype, _internal=True
    )
    torch.save(typed, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


def test_the_hand_made_tensor_of_these_tests_reads():
    assert load_record(tensor_pickle())["pos"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"size": (4,)}, "beyond its storage"),
        ({"offset": 1}, "beyond its storage"),
        ({"stride": (2,)}, "beyond its storage"),
        ({"size": (3, 1)}, "beyond its storage"),
        ({"offset": -1}, "unknown layout"),
        ({"stride": (-1,)}, "unknown layout"),
        ({"size": (2**20, 2**20), "stride": (0, 0)}, "elements in a storage of 3"),
        ({"size": (1.5,)}, "unknown layout"),
    ],
)
def test_a_tensor_that_leaves_its_storage_is_refused(layout, message):
    with pytest.raises(InputError, match=message):
        load_record(tensor_pickle(**layout))


def test_a_storage_stream_decodes_as_torch_decodes_it_and_every_cut_is_noticed():
    stream = _stream(torch.arange(5.0) / 3)
    assert torch.equal(read_storage(stream), torch.arange(5.0) / 3)
    for end in range(len(stream)):
        with pytest.raises(PickleError):
            read_storage(stream[:end])
    with pytest.raises(PickleError, match="longer than it says"):
        read_storage(stream + b"\0")


@pytest.mark.parametrize("dtype", STORAGE_DTYPES.values())
def test_written_storage_streams_are_torchs_own_but_for_the_key(dtype):
    for count in (0, 3, 257, 70_001):
        values = torch.zeros(count, dtype=dtype) if dtype == torch.bool else torch.arange(count).to(dtype)
        theirs = _stream(values)
        key = theirs[theirs.index(b"q\x01X") + 3 :]
        key = key[4 : 4 + key[0]]
        named = bytes([len(key)]) + b"\0\0\0" + key
        assert theirs.replace(named, b"\x01\0\0\x000") in dump_record({"values": values})


def test_a_big_endian_or_foreign_stream_is_refused_and_one_pickled_otherwise_is_not():
    stream = _stream(torch.arange(3.0))
    rest = stream[len(HEAD) :]
    system = {"protocol_version": 1001, "little_endian": True}
    magic, protocol = pickle.loads(HEAD), 1001
    otherwise = pickle.dumps(magic, 4) + pickle.dumps(protocol, 4) + pickle.dumps(system, 4)
    assert read_storage(otherwise + rest).tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(PickleError, match="not little-endian"):
        read_storage(otherwise.replace(b"\x88", b"\x89") + rest)
    with pytest.raises(PickleError, match="no torch stream"):
        read_storage(pickle.dumps(magic + 1) + pickle.dumps(protocol) + pickle.dumps(system) + rest)


def test_a_zip_file_where_a_storage_stream_should_be_is_refused():
    stream = io.BytesIO()
    torch.save(torch.arange(5.0), stream)
    with pytest.raises(InputError, match="cannot be unpickled"):
        load_record(tensor_pickle(stream=stream.getvalue()))


def test_reading_starts_and_ends_where_it_is_told():
    blob = b"xx" + pickle.dumps(7, 2) + pickle.dumps("y", 4)
    seven, at = read_pickle(blob, (), 2)
    letter, end = read_pickle(blob, (), at)
    assert (seven, letter, end) == (7, "y", len(blob))


@pytest.mark.parametrize("seed", range(6))
def test_flipped_cut_and_spliced_records_end_in_fields_or_an_input_error(seed):
    rng = random.Random(seed)
    record = toy_record(seed) | {"a": np.arange(5.0), "b": np.float32(1), "c": OrderedDict(d=[1])}
    plain = {name: value for name, value in record.items() if name not in "abc"}
    blobs = [
        pickle.dumps(Data.from_dict(record), 2),
        pickle.dumps(record, 5),
        dump_record(plain, "pyg1"),
        dump_record(plain, "pyg2"),
    ]
    messages = []
    for _ in range(300):
        try:
            normalize_record(load_record(damaged(rng.choice(blobs), rng)))
        except InputError as error:
            messages.append(str(error))
    assert 20 < len(messages) < 280
    assert all(message.isprintable() for message in messages)


def damaged(blob: bytes, rng: random.Random) -> bytes:
    """Flip one to four bytes, and at times cut the end off or copy a part over another."""
    changed = bytearray(blob)
    for _ in range(rng.randint(1, 4)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    if rng.random() < 0.2:
        del changed[rng.randrange(len(changed)) :]
    elif rng.random() < 0.2:
        start, target, size = rng.randrange(len(blob)), rng.randrange(len(blob)), rng.randrange(64)
        changed[target : target + size] = blob[start : start + size]
    return bytes(changed)
