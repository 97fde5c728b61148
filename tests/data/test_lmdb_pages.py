"""The page reader finds what the lmdb package wrote, and damage ends in an error and never in a crash."""

import random

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molflt.data.lmdb_pages import PageError, PageFile

KEYS = st.binary(min_size=1, max_size=60)
SIZES = st.one_of(st.integers(0, 40), st.integers(1900, 2200), st.integers(4000, 13_000))


def write(path, items: dict[bytes, bytes], rounds: int = 1, **options) -> None:
    path.unlink(missing_ok=True)
    with lmdb.open(
        str(path), subdir=False, lock=False, sync=False, map_size=1 << 26, **options
    ) as environment:
        for start in range(rounds):
            with environment.begin(write=True) as transaction:
                for key, value in list(items.items())[start::rounds]:
                    transaction.put(key, value)


@settings(max_examples=60, deadline=None)
@given(sizes=st.dictionaries(KEYS, SIZES, max_size=120), rounds=st.integers(1, 3), seed=st.integers(0, 99))
def test_it_reads_what_the_lmdb_package_wrote(tmp_path_factory, sizes, rounds, seed):
    rng = random.Random(seed)
    path = tmp_path_factory.mktemp("pages") / "x.lmdb"
    items = {key: rng.randbytes(size) for key, size in sizes.items()}
    write(path, items, rounds)
    pages = PageFile(path)
    assert pages.entries == len(items)
    assert list(pages.items()) == sorted(items.items())
    assert list(pages) == sorted(items)
    assert all(pages.get(key) == value for key, value in items.items())
    assert all(pages.get(key + b"\0") is None for key in items if key + b"\0" not in items)
    assert (pages.first_key(), pages.last_key()) == ((min(items), max(items)) if items else (None, None))


def test_it_reads_a_tree_of_three_levels_after_deletions(tmp_path):
    path = tmp_path / "deep.lmdb"
    items = {f"{n:0100d}".encode(): str(n).encode() * 7 for n in range(3000)}
    write(path, items)
    with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 26) as environment:
        assert environment.stat()["depth"] == 3
        with environment.begin(write=True) as transaction:
            for n in range(0, 3000, 3):
                transaction.delete(f"{n:0100d}".encode())
    left = {key: value for n, (key, value) in enumerate(items.items()) if n % 3}
    assert dict(PageFile(path).items()) == left
    assert PageFile(path).get(f"{3:0100d}".encode()) is None


def test_reading_after_close_is_an_error_and_never_another_file(tmp_path):
    path = tmp_path / "x.lmdb"
    write(path, {b"0": b"a"})
    pages = PageFile(path)
    pages.close()
    pages.close()
    with open(path, "rb"), pytest.raises(OSError, match="Bad file descriptor"):
        pages.get(b"0")


def test_it_sees_the_newest_committed_state(tmp_path):
    path = tmp_path / "x.lmdb"
    for n in range(5):
        with (
            lmdb.open(str(path), subdir=False, lock=False) as environment,
            environment.begin(write=True) as transaction,
        ):
            transaction.put(b"k", b"%d" % n)
        assert PageFile(path).get(b"k") == b"%d" % n


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"\0" * 5, "no LMDB file"),
        (b"PK\x03\x04" + b"x" * 9000, "no LMDB file"),
        (b"\0" * 20_000, "no LMDB file"),
    ],
)
def test_a_foreign_file_is_told_as_such(tmp_path, content, message):
    path = tmp_path / "x.lmdb"
    path.write_bytes(content)
    with pytest.raises(PageError, match=message):
        PageFile(path)


def test_another_data_version_and_sorted_duplicates_are_named(tmp_path):
    path = tmp_path / "x.lmdb"
    write(path, {b"0": b"a"})
    content = bytearray(path.read_bytes())
    for meta in (0, 4096):
        content[meta + 20] = 2
    path.write_bytes(content)
    with pytest.raises(PageError, match="data version 2"):
        PageFile(path)
    path.unlink()
    with lmdb.open(str(path), subdir=False, lock=False, max_dbs=1) as environment:
        database = environment.open_db(b"sub")
        with environment.begin(write=True, db=database) as transaction:
            transaction.put(b"0", b"a")
    with pytest.raises(PageError, match="sub-databases"):
        list(PageFile(path).items())


def test_either_damaged_header_page_is_an_error_and_not_an_older_state(tmp_path):
    path = tmp_path / "x.lmdb"
    write(path, {b"0": b"a"})
    intact = path.read_bytes()
    for at, message in (
        (16, "no LMDB file"),
        (4096 + 16, "header pages"),
        (40, "page size"),
        (4096 + 40, "page size"),
    ):
        content = bytearray(intact)
        content[at] ^= 255
        path.write_bytes(content)
        with pytest.raises(PageError, match=message):
            PageFile(path)


def test_every_cut_that_loses_data_is_noticed_on_opening(tmp_path):
    path = tmp_path / "x.lmdb"
    items = {b"%d" % n: bytes([n]) * (3000 if n % 2 else 300) for n in range(23)}
    write(path, items)
    content = path.read_bytes()
    for size in range(0, len(content) - 4096, 511):
        path.write_bytes(content[:size])
        with pytest.raises(PageError, match=r"cut short|empty|no LMDB"):
            PageFile(path)
    path.write_bytes(content[:-1])  # the unused end of the last value's page
    assert dict(PageFile(path).items()) == items


def test_free_pages_missing_at_the_end_are_no_damage(tmp_path):
    path = tmp_path / "x.lmdb"
    write(path, {b"0": b"a", b"1": b"b" * 9000})
    with (
        lmdb.open(str(path), subdir=False, lock=False) as environment,
        environment.begin(write=True) as transaction,
    ):
        transaction.delete(b"1")
    pages = PageFile(path)
    used = max(pages._root, 1) + 1  # the tree's one page; what follows is free
    content = path.read_bytes()
    path.write_bytes(content[: used * 4096])
    assert len(content) > used * 4096
    assert list(PageFile(path).items()) == [(b"0", b"a")]


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes_end_in_data_or_a_page_error(tmp_path, seed):
    rng = random.Random(seed)
    path = tmp_path / "x.lmdb"
    items = {b"%d" % n: rng.randbytes(rng.choice((5, 300, 3000))) for n in range(211)}
    write(path, items, rounds=2)
    content = path.read_bytes()
    structure = [at for at in range(len(content)) if at % 4096 < 700]  # headers, pointers, metas, nodes
    outcomes = {"read": 0, "refused": 0}
    for _ in range(120):
        changed = bytearray(content)
        for _ in range(rng.randint(1, 30)):
            changed[rng.choice(structure)] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            pages = PageFile(path)
            for _ in pages.items():
                pass
            for key in items:
                pages.get(key)
            outcomes["read"] += 1
        except PageError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 20, outcomes
