"""Whatever the bytes, reading ends in results or an `InputError`: no other exception, crash, hang or payload.

Whole files are cut, flipped and edited (LMDBs, checkpoints, structure files, ASE databases), and so is what
lies behind a checksum (the pickle in a checkpoint), and records are made up from nothing. 2,000 inputs run by
default; `MOLFLT_FUZZ_INPUTS=50000` runs that many. Address space is limited while an input is read, so that a
length read from a damaged file cannot ask for all memory.
"""

import io
import os
import pickle
import resource
import signal
import warnings
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path

import ase.db
import ase.io
import numpy as np
import pytest
import torch
from ase.build import bulk, fcc111, molecule
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from molflt.checkpoint import (
    Checkpoint,
    CheckpointMetadata,
    load_checkpoint,
    model_from_config,
    save_checkpoint,
)
from molflt.data.convert import convert
from molflt.data.fields import FIELDS
from molflt.data.inspect import inspect_lmdb
from molflt.data.lmdb import RecordReader
from molflt.data.lmdb_writer import write_entries
from molflt.data.pickle_writer import dump_record
from molflt.data.pickles import load_record, peek_record
from molflt.data.records import normalize_record
from molflt.data.sizes import record_sizes
from molflt.data.sources import iter_source
from molflt.data.structures import read_structures
from molflt.errors import InputError
from molflt.testing import toy_record, toy_records

INPUTS = int(os.environ.get("MOLFLT_FUZZ_INPUTS", "2000"))
SECONDS = 120
"""Wall-clock limit of one input, on a busy machine."""
EXTRA_MEMORY = 3 << 30
"""Bytes of address space an input may ask for; the files are a few kB."""

TOKENS = [
    b"nan", b"inf", b"-1", b"0", b"1e999", b"-1e-400", b"99999999999999999999", b"65537", b"1_000",
    b"\xc2\xb2", b"X", b"D", b"Xx", b"\x00", b"\xff\xfe", b"\n", b"\r", b"\t", b" ", b'"', b"'", b"{",
    b"}", b"[", b"]", b"\\", b"=", b":", b"?", b".", b";", b"#", b"_JSON [1, [2]]", b"Lattice=",
    b"Properties=", b"pbc=", b"loop_", b"data_", b"_atom_site_", b"null", b"true",
    b'{"__ndarray__": [[9999999999], "float64", []]}', b"__complex__", b"((((", b"0.5(1)", b"Selective",
    b"Direct", b"\x80\x04", b"cos\nsystem\n(S'x'\ntR.", b"VEC1", b"T T F", b"x-y,y,-z",
]  # fmt: skip


class Hang(BaseException):
    """An input took too long."""


class Payload:
    """A pickle that makes a folder when it is loaded by something that runs pickles."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def inputs(share: float):
    """Hypothesis' settings for this share of all inputs."""
    return settings(
        max_examples=max(round(share * INPUTS), 1),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


number = st.one_of(
    st.integers(0, 2**16), st.integers(0, 400), st.integers(0, 60).map(lambda page: 4096 * page)
)
edit = st.one_of(
    st.tuples(st.just("set"), number, st.integers(0, 255)),
    st.tuples(st.just("set"), number, st.integers(0, 255)),
    st.tuples(st.just("cut"), number, st.just(0)),
    st.tuples(st.just("drop"), number, st.integers(1, 200)),
    st.tuples(st.just("repeat"), number, st.integers(1, 200)),
    st.tuples(st.just("put"), number, st.sampled_from(TOKENS)),
    st.tuples(st.just("over"), number, st.sampled_from(TOKENS)),
    st.tuples(st.just("word"), number, st.sampled_from(TOKENS)),
)
edits = st.lists(edit, min_size=1, max_size=6)


def edited(content: bytes, changes) -> bytes:
    """Apply edits; positions are taken modulo the length."""
    changed = bytearray(content)
    for kind, position, value in changes:
        if not changed:
            break
        at = position % len(changed)
        if kind == "set":
            changed[at] = value
        elif kind == "cut":
            del changed[at:]
        elif kind == "drop":
            del changed[at : at + value]
        elif kind == "repeat":
            changed[at:at] = changed[at : at + value]
        elif kind == "put":
            changed[at:at] = value
        elif kind == "over":
            changed[at : at + len(value)] = value
        else:
            end = min((e for e in (changed.find(c, at) for c in b" \n,:") if e >= 0), default=len(changed))
            changed[at:end] = value
    return bytes(changed)


@pytest.fixture
def guard(tmp_path):
    """Runs a reader on an input under the limits, tells results from errors, and checks for the payload."""
    marker = tmp_path / "payload-ran"
    outcomes = {"results": 0, "errors": 0}
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    old = resource.getrlimit(resource.RLIMIT_AS)

    def hang(*args):
        raise Hang(f"no end after {SECONDS} s")

    @contextmanager
    def limits():
        handler = signal.signal(signal.SIGALRM, hang)
        signal.alarm(SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_MEMORY, old[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, old)
            signal.alarm(0)
            signal.signal(signal.SIGALRM, handler)

    def run(reader, *args) -> None:
        message = ""
        with limits(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                reader(*args)
                outcomes["results"] += 1
            except InputError as error:
                outcomes["errors"] += 1
                message = str(error)
        assert message.isprintable(), repr(message)
        assert not marker.exists(), "a payload was executed"

    run.marker, run.outcomes = marker, outcomes
    return run


def evil_tensor(marker: Path) -> bytes:
    """A tensor's pickle whose storage stream holds the payload."""
    stream = io.BytesIO()
    for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, Payload(marker)):
        pickle.dump(part, stream, protocol=2)
    storage = type(
        "S", (), {"__reduce__": lambda self: (torch.storage._load_from_bytes, (stream.getvalue(),))}
    )()
    return pickle.dumps({"pos": storage, "atomic_numbers": [1]})


def hostile_records(marker: Path) -> list[bytes]:
    """Records that run the payload wherever they are unpickled plainly."""
    payload = Payload(marker)
    return [
        pickle.dumps(payload),
        pickle.dumps({"pos": payload, "atomic_numbers": [1]}),
        pickle.dumps(np.array([payload, 1], dtype=object)),
        evil_tensor(marker),
        pickle.dumps(payload, protocol=0),
        b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00" + pickle.dumps(payload, protocol=2)[2:],
    ]


def read_all(path) -> None:
    """All ways into an LMDB; a bad record does not hide those after it."""
    reader = RecordReader(path)
    refused = None
    for index in range(min(len(reader), 20)):
        try:
            normalize_record(*reader.read(index), default_sid=index)
        except InputError as error:
            refused = error
    for way in (record_sizes, lambda reader: inspect_lmdb(reader.path)):
        try:
            way(reader)
        except InputError as error:
            refused = error
    reader.close()
    if refused:
        raise refused


def read_source(path) -> None:
    """As a conversion reads it."""
    for item in iter_source(path):
        if isinstance(item, InputError):
            raise item


# LMDBs


def test_the_payload_runs_where_pickles_are_run(tmp_path):
    """The control: these records are live."""
    for blob in hostile_records(tmp_path / "marker"):
        with suppress(Exception):
            pickle.loads(blob)
        os.rmdir(tmp_path / "marker")


@pytest.mark.parametrize("kind", ["pyg1", "pyg2", "hostile"])
def test_any_bytes_of_an_lmdb(tmp_path, guard, kind):
    values = (
        [*hostile_records(guard.marker), dump_record(toy_record(0, 5))]
        if kind == "hostile"
        else [dump_record(record, kind) for record in toy_records(5)]
    )
    write_entries(tmp_path / "x.lmdb", values)
    content = (tmp_path / "x.lmdb").read_bytes()

    @example([])
    @given(edits)
    @inputs(0.1)
    def run(changes):
        (tmp_path / "x.lmdb").write_bytes(edited(content, changes))
        guard(read_all, tmp_path / "x.lmdb")

    run()
    assert guard.outcomes["errors"] > 0
    assert guard.outcomes["results"] > 0 or kind == "hostile"


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
)
arrays = st.builds(
    lambda shape, dtype, fill: np.full(shape, fill, dtype=dtype),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.sampled_from(["f4", "f8", "i8", "i2", "u1", "?", ">f8", "f2", "u2", "g", "S3", "U2"]),
    st.integers(0, 9),
)
values = st.recursive(
    st.one_of(
        scalars, arrays, arrays.filter(lambda a: a.dtype.str in ("<f4", "<f8", "<i8")).map(torch.from_numpy)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
    ),
    max_leaves=4,
)


def test_any_values_in_a_record(guard):
    names = st.one_of(st.sampled_from([*FIELDS, "batch", "num_nodes", "x", "keys"]), st.text(max_size=4))

    @example({}, True, 4)
    @given(st.dictionaries(names, values, max_size=6), st.booleans(), st.sampled_from([2, 3, 4, 5]))
    @inputs(0.1)
    def run(fields, complete, protocol):
        record = toy_record(0, 5) | fields if complete else fields
        guard(
            lambda blob: normalize_record(load_record(blob)), blob := pickle.dumps(record, protocol=protocol)
        )
        guard(peek_record, blob)

    run()
    assert min(guard.outcomes.values()) > 0


# Checkpoints


@pytest.fixture
def checkpoint_bytes(tmp_path, tiny_config):
    config = tiny_config(tmp_path / "run")
    save_checkpoint(tmp_path / "x.ckpt", Checkpoint(config, model_from_config(config), CheckpointMetadata()))
    return (tmp_path / "x.ckpt").read_bytes()


def test_any_bytes_of_a_checkpoint(tmp_path, guard, checkpoint_bytes):
    @given(edits)
    @inputs(0.06)
    def run(changes):
        (tmp_path / "x.ckpt").write_bytes(edited(checkpoint_bytes, changes))
        guard(load_checkpoint, tmp_path / "x.ckpt")

    run()
    assert guard.outcomes["errors"] > 0


@pytest.mark.parametrize("hostile", [False, True])
def test_any_pickle_within_a_checkpoint_whose_checksums_are_right(tmp_path, guard, checkpoint_bytes, hostile):
    with zipfile.ZipFile(io.BytesIO(checkpoint_bytes)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    [inner] = (name for name in members if name.endswith("data.pkl"))
    content = members[inner]
    if hostile:
        # The payload in place of the configuration, still within torch's own pickle.
        content = content[:-1] + pickle.dumps(Payload(guard.marker), protocol=2)[2:]

    @example([])  # Loads, so that errors are the changes'.
    @given(edits)
    @inputs(0.07)
    def run(changes):
        changed = edited(content, changes)
        with zipfile.ZipFile(tmp_path / "x.ckpt", "w") as archive:
            for name, value in members.items():
                archive.writestr(name, changed if name == inner else value)
        guard(load_checkpoint, tmp_path / "x.ckpt")

    run()
    assert guard.outcomes["errors"] > 0
    assert guard.outcomes["results"] > 0 or hostile


# Structure files and ASE databases


def structure_files(folder: Path) -> dict[str, bytes]:
    """One small file of each kind."""
    slab = fcc111("Cu", (1, 1, 3), vacuum=6.0)
    slab.info = {"note": "toy", "shape": np.eye(2)}
    salt = bulk("NaCl", "rocksalt", 5.6)
    ase.io.write(folder / "x.extxyz", [slab, molecule("CH4")])
    ase.io.write(folder / "x.cif", salt)
    ase.io.write(folder / "x.vasp", slab)
    ase.io.write(folder / "x.traj", [slab, molecule("CH4")])
    ase.io.write(folder / "x.json", slab)
    return {file.suffix: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("suffix", [".extxyz", ".cif", ".vasp", ".traj", ".json"])
def test_any_bytes_of_a_structure_file(tmp_path, guard, suffix):
    (tmp_path / "made").mkdir()
    content = structure_files(tmp_path / "made")[suffix]
    read_structures(tmp_path / "made" / f"x{suffix}")

    @example([])
    @given(edits)
    @inputs(0.06)
    def run(changes):
        (tmp_path / f"x{suffix}").write_bytes(edited(content, changes))
        guard(read_structures, tmp_path / f"x{suffix}")

    run()
    assert min(guard.outcomes.values()) > 0


@pytest.mark.parametrize("suffix", [".db", ".aselmdb"])
def test_any_bytes_of_an_ase_database(tmp_path, guard, suffix):
    write_entries(tmp_path / "a.lmdb", map(dump_record, toy_records(2, edges=False)))
    convert(tmp_path / "a.lmdb", tmp_path / f"x{suffix}")
    content = (tmp_path / f"x{suffix}").read_bytes()

    @example([])
    @given(edits)
    @inputs(0.04)
    def run(changes):
        (tmp_path / f"x{suffix}").write_bytes(edited(content, changes))
        guard(read_source, tmp_path / f"x{suffix}")

    run()
    assert min(guard.outcomes.values()) > 0


@pytest.mark.parametrize(
    "name",
    ["x.traj", "x.json", "x.pckl", "x.pkl", "x.trj", "x.db", "x.gpw", "x.py", "x.extxyz", "x", "x.lmdb"],
)
def test_a_pickle_by_the_name_of_a_structure_or_checkpoint_is_never_run(tmp_path, guard, name):
    for blob in hostile_records(guard.marker):
        (tmp_path / name).write_bytes(blob)
        for reader in (read_structures, load_checkpoint, RecordReader, read_source):
            guard(reader, tmp_path / name)
    for new_format in (True, False):
        torch.save(
            {"molflt": Payload(guard.marker)}, tmp_path / name, _use_new_zipfile_serialization=new_format
        )
        for reader in (read_structures, load_checkpoint, RecordReader):
            guard(reader, tmp_path / name)
    assert guard.outcomes == {"results": 0, "errors": 30}
