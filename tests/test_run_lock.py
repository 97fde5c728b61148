"""Only one process at a time writes a run folder."""

import subprocess
import sys

import pytest

from molflt import cli
from molflt.config import save_config
from molflt.errors import InputError
from molflt.run_lock import LOCK, RunLock
from molflt.training import train

HOLD = """
import sys, time
from pathlib import Path
from molflt.run_lock import RunLock
RunLock(Path(sys.argv[1])).acquire()
print("locked", flush=True)
time.sleep(300)
"""
SETTINGS = {"training.epochs": 1, "data.val_splits": "[val_b]"}


@pytest.fixture
def other():
    """Makes a process that has a folder's lock."""
    processes = []

    def start(folder):
        process = subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_second_run_in_a_folder_is_refused_until_the_first_is_killed(tiny_config, tmp_path, other, capsys):
    """In one line, and the folder stays as it is; what SIGKILL leaves is in nobody's way."""
    output = tmp_path / "run"
    config = tiny_config(output, **SETTINGS)
    save_config(config, tmp_path / "tiny.yaml")
    first = other(output)
    for words in ([], ["--resume"]):
        assert cli.main(["train", str(tmp_path / "tiny.yaml"), *words]) == 2
        assert capsys.readouterr().err == (
            f"molflt: error: another run is writing {output}; wait for its end, stop it, or choose another "
            "--training.output\n"
        )
    assert [path.name for path in output.iterdir()] == [LOCK]
    first.kill()
    first.wait()
    assert (output / LOCK).exists()
    train(config, progress=False)
    assert not (output / LOCK).exists()


def test_a_lock_ends_with_its_block_and_is_that_of_the_file_in_place(tmp_path, other):
    """Also where an error ends it; the folder is then another process's to lock."""

    def fail():
        with RunLock(tmp_path / "run") as lock:
            lock.acquire()
            lock.acquire()
            assert (tmp_path / "run" / LOCK).exists()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not (tmp_path / "run" / LOCK).exists()
    other(tmp_path / "run")
    with pytest.raises(InputError, match="another run is writing"), RunLock(tmp_path / "run") as lock:
        lock.acquire()
    assert (tmp_path / "run" / LOCK).exists()
