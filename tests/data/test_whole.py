"""What is written appears whole or not at all, wherever the writer fails or is killed."""

import multiprocessing
import os
import random
import shutil
import signal
import time

import pytest

from molflt.data.convert import convert
from molflt.data.datasets import list_splits
from molflt.data.splitting import split_lmdb
from molflt.data.whole import PARTIAL, check_destination, whole_file, whole_folder
from molflt.errors import InputError
from molflt.testing import write_toy_lmdb


def test_a_file_takes_its_name_at_the_end_and_replaces_what_is_there(tmp_path):
    path = tmp_path / "new" / "x.txt"
    for text in ("one", "two"):
        with whole_file(path) as growing:
            growing.write_text(text)
            assert not path.exists() or path.read_text() == "one"
        assert path.read_text() == text
    assert os.listdir(path.parent) == ["x.txt"]


@pytest.mark.parametrize("old", ["nothing", "a file", "a folder", "a link"])
def test_a_folder_takes_its_name_at_the_end_and_replaces_what_is_there(tmp_path, old):
    path = tmp_path / "x"
    if old == "a file":
        path.write_text("old")
    elif old == "a folder":
        path.mkdir()
        (path / "old").write_text("old")
    elif old == "a link":
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to(tmp_path / "elsewhere")
    with whole_folder(path) as growing:
        (growing / "a").mkdir()
        (growing / "a" / f"b.txt{PARTIAL}").write_text("new")
        assert not (path / "a").exists()
    assert (path / "a" / "b.txt").read_text() == "new"
    assert sorted(os.listdir(path)) == ["a"]
    assert os.listdir(path / "a") == ["b.txt"]
    assert sorted(os.listdir(tmp_path)) == (["elsewhere", "x"] if old == "a link" else ["x"])
    assert old != "a link" or os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("make", [whole_file, whole_folder])
def test_a_failed_block_leaves_what_was_there(tmp_path, make):
    path = tmp_path / "x"
    path.write_text("old")

    def fail() -> None:
        with make(path) as growing:
            (growing if make is whole_file else growing / "y").write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert os.listdir(tmp_path) == ["x"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("make", [whole_file, whole_folder])
def test_a_place_that_cannot_be_written_is_an_input_error(tmp_path, make):
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(InputError, match=r"file/x cannot be written: .*; choose a writable place"),
        make(tmp_path / "file" / "x"),
    ):
        pytest.fail("the block ran")


def test_what_is_there_is_kept_unless_it_may_be_replaced(tmp_path):
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("dangling", "."):
        with pytest.raises(InputError, match="exists already"):
            check_destination(tmp_path / name, overwrite=False)
        check_destination(tmp_path / name, overwrite=True)
    check_destination(tmp_path / "free", overwrite=False)


@pytest.mark.filterwarnings("ignore:This process .* multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("name", ["x.lmdb", "x.extxyz", "x.db", "x.aselmdb", "shards", "splits"])
def test_a_conversion_or_split_killed_anywhere_leaves_the_whole_or_nothing_that_opens(tmp_path, name):
    source, destination = write_toy_lmdb(tmp_path / "in" / "a.lmdb", 60), tmp_path / "out" / name
    start = time.monotonic()
    _work(source, tmp_path / "whole" / name)
    duration = time.monotonic() - start
    rng = random.Random(name)
    context = multiprocessing.get_context("fork")
    killed = 0
    for _ in range(7):
        started = context.Event()
        process = context.Process(target=_work, args=(source, destination, started))
        process.start()
        assert started.wait(120)
        time.sleep(rng.uniform(0, 0.9 * duration))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        killed += process.exitcode == -signal.SIGKILL
        process.close()
        if destination.exists():
            assert _count(destination, tmp_path) == 60
            shutil.rmtree(destination) if destination.is_dir() else destination.unlink()
        for left in (tmp_path / "out").iterdir() if (tmp_path / "out").exists() else ():
            assert left.name.startswith(f".{name}.")
    assert killed
    assert list_splits(tmp_path / "out") == []


def _work(source, destination, started=None) -> None:
    if started is not None:
        started.set()
    if destination.name == "splits":
        split_lmdb(source, destination, {"a": 0.5, "b": 0.5})
    else:
        convert(source, destination, shard_size=13 if destination.name == "shards" else None)


def _count(destination, folder) -> int:
    parts = [destination / "a", destination / "b"] if destination.name == "splits" else [destination]
    return sum(convert(part, folder / "again.lmdb", overwrite=True).records for part in parts)
