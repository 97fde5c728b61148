"""LMDB files of records: every form is read, writing is whole and repeatable, damage is one error."""

import multiprocessing
import os
import pickle
import random
import shutil
import signal
import time
import tracemalloc

import lmdb
import pytest

from molflt.data.lmdb import RecordFile, RecordReader, find_lmdb_files
from molflt.data.lmdb_pages import PageFile
from molflt.data.lmdb_writer import write_entries, write_lmdb
from molflt.data.records import normalize_record
from molflt.errors import InputError
from molflt.testing import assert_same_sample, toy_records, write_toy_lmdb


def sids(path) -> list[int]:
    reader = RecordReader(path)
    return [int(reader.read(index)[0]["sid"]) for index in range(len(reader))]


# Where the records are


def test_a_file_a_folder_with_data_lmdb_and_lmdbs_own_folder_read_the_same(tmp_path):
    write_toy_lmdb(tmp_path / "a" / "data.lmdb", 3)
    shutil.copytree(tmp_path / "a", tmp_path / "b" / "own.lmdb")
    os.rename(tmp_path / "b" / "own.lmdb" / "data.lmdb", tmp_path / "b" / "own.lmdb" / "data.mdb")
    expected = [1000, 1001, 1002]
    assert sids(tmp_path / "a" / "data.lmdb") == expected
    assert sids(tmp_path / "a") == expected
    assert sids(tmp_path / "b") == expected
    assert sids(tmp_path / "b" / "own.lmdb") == expected


def test_shards_are_read_in_sorted_order_all_of_them_and_nothing_else(tmp_path):
    for shard in (2, 0, 1):
        write_toy_lmdb(
            tmp_path / f"data.{shard:04d}.lmdb", shard + 1, first_seed=10 * shard, length=shard % 2 == 0
        )
    (tmp_path / "data.0000.lmdb-lock").write_bytes(b"x")
    (tmp_path / "metadata.npz").write_bytes(b"x")
    reader = RecordReader(tmp_path)
    assert [len(file) for file in reader.files] == [1, 2, 3]
    assert sids(tmp_path) == [1000, 1010, 1011, 1020, 1021, 1022]
    assert reader.locate(2)[0].path.name == "data.0001.lmdb"
    for index in (-1, 6):
        with pytest.raises(IndexError, match=f"record {index} of 6"):
            reader.read(index)


def test_a_folder_of_more_shards_than_files_may_be_open_is_read(tmp_path, monkeypatch):
    """Of 23 shards at most five are open at a time, in order and at random; closed ones stay closed."""
    monkeypatch.setattr("molflt.data.lmdb.MAX_OPEN_FILES", 5)
    for number in range(23):
        write_toy_lmdb(tmp_path / f"data.{number:04d}.lmdb", 2, first_seed=2 * number)
    reader = RecordReader(tmp_path)

    def check(index):
        fields, _ = reader.read(index)
        assert int(fields["sid"]) == 1000 + index
        assert sum(not file.is_parked for file in reader.files) == 5

    for index in [*range(46), *random.Random(0).sample(range(46), 46)]:
        check(index)
    assert [file.pages.size for file in reader.files] == [file.path.stat().st_size for file in reader.files]
    assert sum(not file.is_parked for file in reader.files) == 5
    parked = next(file for file in reader.files if file.is_parked)
    write_toy_lmdb(parked.path, 3)
    with pytest.raises(InputError, match="has changed while it was in use"):
        parked.read(0)
    reader.close()
    with pytest.raises(InputError):
        reader.read(0)


def test_an_empty_folder_and_a_missing_path_say_what_to_give(tmp_path):
    with pytest.raises(InputError, match=r"holds no \.lmdb file; give"):
        find_lmdb_files(tmp_path)
    with pytest.raises(InputError, match="does not exist; give"):
        RecordReader(tmp_path / "train")


# How many there are


@pytest.mark.parametrize("length", [True, False, 4, 6, 0, 10**9])
def test_the_number_of_records_is_right_with_without_and_with_a_wrong_length(tmp_path, length):
    path = write_toy_lmdb(tmp_path / "x.lmdb", 5, length=length)
    assert sids(path) == [1000, 1001, 1002, 1003, 1004]


@pytest.mark.parametrize("count", [1, 9, 10, 11, 99, 100, 101, 1000, 1234])
def test_counting_needs_no_listing_where_keys_have_no_gaps(tmp_path, count):
    write_entries(tmp_path / "x.lmdb", (b"%d" % n for n in range(count)))
    file = RecordFile(tmp_path / "x.lmdb")
    assert len(file) == count
    assert file._keys is None
    assert [file.read(n) for n in range(count)] == [b"%d" % n for n in range(count)]


@pytest.mark.parametrize(
    "keys", [["0", "1", "3"], ["1", "2", "3"], ["0", "1", "7", "10"], ["00", "01"], ["5"]]
)
@pytest.mark.parametrize("extra", [[], ["metadata"], ["length"], ["about", "length", "zzz"], ["#"]])
def test_gaps_and_other_keys_are_stepped_over(tmp_path, keys, extra):
    _put(tmp_path / "x.lmdb", {key.encode(): key.encode() for key in [*keys, *extra]})
    file = RecordFile(tmp_path / "x.lmdb")
    assert [file.read(n).decode() for n in range(len(file))] == keys
    assert file.name(0).startswith(f"record {keys[0]} of ")


def _put(path, items: dict[bytes, bytes]) -> None:
    with (
        lmdb.open(str(path), subdir=False, lock=False) as environment,
        environment.begin(write=True) as transaction,
    ):
        for key, value in items.items():
            transaction.put(key, value)


def test_opening_460328_records_reads_a_few_pages_and_keeps_little(tmp_path, monkeypatch):
    total = 460_328
    path = tmp_path / "x.lmdb"
    record = {"pos": [[0.0, 0.0, 0.0]], "atomic_numbers": [1]}
    write_entries(path, (pickle.dumps({"sid": n, **record}) for n in range(total)))
    reads = []
    read = PageFile._read
    monkeypatch.setattr(
        PageFile, "_read", lambda self, *args, **kw: reads.append(args) or read(self, *args, **kw)
    )
    tracemalloc.start()
    try:
        reader = RecordReader(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(reader) == total
    assert len(reads) < 64
    assert sum(count for _, count in reads) < 1 << 20
    assert peak < 5_000_000
    for index in (0, 1, 9, 10, 99_999, 100_000, 271_828, total - 1):
        assert normalize_record(*reader.read(index)).sid.item() == index


# What is no data


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", r"is empty \(0 bytes\)"), (b"data_image0\n_cell_length_a 5.8\n" * 99, "is no LMDB file")],
)
def test_empty_and_foreign_files_give_one_line_that_names_them(tmp_path, content, message):
    path = tmp_path / "x.lmdb"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"x.lmdb {message}") as error:
        RecordReader(path)
    assert "\n" not in str(error.value)


def test_a_truncated_file_says_how_much_is_missing(tmp_path):
    path = write_toy_lmdb(tmp_path / "x.lmdb", 5)
    size = path.stat().st_size
    os.truncate(path, size // 2)
    with pytest.raises(InputError, match=rf"x.lmdb is cut short: it has {size // 2:,} of {size:,} bytes"):
        RecordReader(path)


def test_a_file_cut_while_it_is_read_is_an_error_and_not_a_crash(tmp_path):
    path = write_toy_lmdb(tmp_path / "x.lmdb", 5)
    reader = RecordReader(path)
    os.truncate(path, 4096 * 3)
    with pytest.raises(InputError, match="cut short"):
        [reader.read(index) for index in range(5)]


def test_lmdbs_of_other_things_are_named(tmp_path):
    _put(tmp_path / "ase.lmdb", {b"nextid": b"3", b"1": b"x", b"2": b"y", b"metadata": b"z"})
    with pytest.raises(InputError, match="is an ASE database"):
        RecordReader(tmp_path / "ase.lmdb")
    _put(tmp_path / "words.lmdb", {b"cat": b"x", b"dog": b"y"})
    with pytest.raises(InputError, match=r"its 2 keys \(first: b'cat'\) are not numbers"):
        RecordReader(tmp_path / "words.lmdb")
    for name, items in (("none.lmdb", {}), ("length.lmdb", {b"length": b"x"})):
        _put(tmp_path / name, items)
        with pytest.raises(InputError, match="holds no records"):
            RecordReader(tmp_path / name)


def test_a_record_that_is_refused_is_named_by_its_key_and_file(tmp_path):
    write_entries(tmp_path / "x.lmdb", [pickle.dumps({"a": 1}), pickle.dumps(os.getcwd), b"rubbish"])
    reader = RecordReader(tmp_path / "x.lmdb")
    assert reader.read(0)[0] == {"a": 1}
    with pytest.raises(InputError, match=r"record 1 of .*x.lmdb names (posix|nt).getcwd"):
        reader.read(1)
    with pytest.raises(InputError, match=r"record 2 of .*x.lmdb cannot be unpickled"):
        reader.read(2)


@pytest.mark.parametrize("seed", range(4))
def test_flipped_and_cut_files_end_in_samples_or_an_input_error(tmp_path, seed):
    rng = random.Random(seed)
    path = write_toy_lmdb(tmp_path / "x.lmdb", 7, layout="pyg1" if seed % 2 else "pyg2")
    content = path.read_bytes()
    headers = [at for at in range(len(content)) if at % 4096 < 200]
    messages = []
    for _ in range(60):
        changed = bytearray(content)
        for _ in range(rng.randint(1, 6)):
            changed[rng.choice(headers) if rng.random() < 0.7 else rng.randrange(len(changed))] = (
                rng.randrange(256)
            )
        path.write_bytes(changed[: rng.randrange(len(changed))] if rng.random() < 0.2 else changed)
        try:
            reader = RecordReader(path)
            for index in range(len(reader)):
                normalize_record(*reader.read(index))
        except InputError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert all(message.isprintable() for message in messages)


# Life cycle


def test_reading_leaves_no_trace_in_the_folder(tmp_path):
    path = write_toy_lmdb(tmp_path / "x.lmdb", 3)
    before = path.stat().st_mtime_ns, path.read_bytes()
    os.chmod(path, 0o444)
    os.chmod(tmp_path, 0o555)
    try:
        assert len(sids(path)) == 3
    finally:
        os.chmod(tmp_path, 0o755)
    assert os.listdir(tmp_path) == ["x.lmdb"]
    assert (path.stat().st_mtime_ns, path.read_bytes()) == before


def test_one_file_serves_many_readers_at_once_and_while_lmdb_has_it_open(tmp_path):
    path = write_toy_lmdb(tmp_path / "x.lmdb", 3)
    readers = [RecordReader(path) for _ in range(50)]
    with lmdb.open(str(path), subdir=False, lock=False) as environment, environment.begin():
        assert [int(reader.read(2)[0]["sid"]) for reader in readers] == [1002] * 50
    readers[0].close()
    assert int(readers[1].read(0)[0]["sid"]) == 1000


def test_a_reader_pickles_as_its_path(tmp_path):
    path = write_toy_lmdb(tmp_path / "x.lmdb", 3)
    reader = RecordReader(path)
    blob = pickle.dumps(reader)
    assert len(blob) < 300 + len(str(path))
    assert pickle.loads(blob).read(1)[1] == reader.read(1)[1]


# Writing


@pytest.mark.parametrize("layout", ["pyg1", "pyg2"])
def test_the_same_records_give_the_same_bytes_and_read_back(tmp_path, layout):
    records = toy_records(7)
    for name in ("a.lmdb", "b.lmdb"):
        assert write_lmdb(tmp_path / name, iter(toy_records(7)), layout) == 7
    assert (tmp_path / "a.lmdb").read_bytes() == (tmp_path / "b.lmdb").read_bytes()
    reader = RecordReader(tmp_path / "a.lmdb")
    for index, record in enumerate(records):
        assert_same_sample(normalize_record(*reader.read(index)), normalize_record(record))


def test_samples_can_be_written_back(tmp_path):
    samples = [normalize_record(record) for record in toy_records(3)]
    write_lmdb(tmp_path / "x.lmdb", samples)
    reader = RecordReader(tmp_path / "x.lmdb")
    for index, sample in enumerate(samples):
        assert_same_sample(normalize_record(*reader.read(index)), sample)


def test_the_map_grows_as_needed_and_the_file_has_no_spare_pages(tmp_path):
    values = [bytes([n]) * 700_000 for n in range(61)]
    write_entries(tmp_path / "x.lmdb", iter(values))
    file = RecordFile(tmp_path / "x.lmdb")
    assert [file.read(n) for n in range(61)] == values
    size = (tmp_path / "x.lmdb").stat().st_size
    assert size < sum(map(len, values)) * 1.01
    with lmdb.open(str(tmp_path / "x.lmdb"), subdir=False, readonly=True, lock=False) as environment:
        pages = environment.stat()
        used = pages["branch_pages"] + pages["leaf_pages"] + pages["overflow_pages"] + 2
        assert used * pages["psize"] == size
        with environment.begin() as transaction:
            assert pickle.loads(transaction.get(b"length")) == 61


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = write_toy_lmdb(tmp_path / "x.lmdb", 3)
    before = path.read_bytes()

    def failing():
        yield from toy_records(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_lmdb(path, failing())
    assert os.listdir(tmp_path) == ["x.lmdb"]
    assert path.read_bytes() == before


def test_a_place_that_cannot_be_written_is_an_input_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"file/x\.lmdb cannot be written"):
        write_lmdb(tmp_path / "file" / "x.lmdb", toy_records(1))


def _write_without_end(path, started) -> None:
    def values():
        while True:
            started.set()
            yield b"x" * 1000

    write_entries(path, values())


@pytest.mark.filterwarnings("ignore:This process .* multi-threaded:DeprecationWarning")
def test_a_killed_write_leaves_no_file_that_opens(tmp_path):
    context = multiprocessing.get_context("fork")
    started = context.Event()
    process = context.Process(target=_write_without_end, args=(tmp_path / "x.lmdb", started))
    process.start()
    assert started.wait(120)
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    process.close()
    with pytest.raises(InputError, match=r"holds no \.lmdb file"):
        find_lmdb_files(tmp_path)
