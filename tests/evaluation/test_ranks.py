"""Several processes count each system once, print once, and end together."""

import os
import socket
import subprocess
import sys

import pytest
import torch

from molflt import cli
from molflt.evaluation import predictions
from molflt.evaluation.predictions import predict_split, predict_unlabelled
from molflt.evaluation.ranks import _stdout_on_stderr, joined_processes, place
from molflt.testing import write_toy_lmdb

SCRIPT = """
import os, sys
from molflt import cli
for words in (sys.argv[2].split(), sys.argv[3].split()):
    print("status", cli.main(words), flush=True)
    os.environ["MASTER_PORT"] = sys.argv[1]
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_two_processes_print_what_one_does_once(finished_run, toy_root, tmp_path, capsys):
    """Seven and five systems in batches of three; then a split of which one system has no label."""
    (tmp_path / "unlabelled").mkdir()
    write_toy_lmdb(tmp_path / "unlabelled" / "data.lmdb", 3, labels=False)
    words = ["evaluate", str(finished_run.best_checkpoint), "--batch-size", "3", "--by", "size"]
    bad = [*words, "--data", str(tmp_path), "--split", "unlabelled"]
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-c", SCRIPT, free_port(), " ".join(words), " ".join(bad)]
    processes = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    (first, first_errors), (second, second_errors) = (
        process.communicate(timeout=600) for process in processes
    )
    assert cli.main(words) == 0
    alone = capsys.readouterr().out
    assert "7" in alone
    assert first == alone + "status 0\nstatus 2\n", first_errors
    assert second == "status 0\nstatus 2\n", second_errors
    assert "has no y_relaxed" in first_errors
    assert "molflt: error" not in second_errors


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_put_together_are_the_whole(finished_run, toy_root, monkeypatch, size):
    """Energies, targets and ids in the data set's order, for more processes than systems too."""
    from molflt.build import build_dataset
    from molflt.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(finished_run.best_checkpoint)
    dataset = build_dataset(checkpoint.config.data, "val_a")
    whole = predict_split(checkpoint.model, dataset, 3)
    assert whole.sid.tolist() == dataset.sids.tolist()
    monkeypatch.setattr(predictions, "shares", lambda own: [own(rank, size) for rank in range(size)])
    parts = predict_split(checkpoint.model, dataset, 2)
    assert torch.equal(parts.sid, whole.sid)
    assert torch.equal(parts.target, whole.target)
    torch.testing.assert_close(parts.energy, whole.energy)
    sids, energies = predict_unlabelled(checkpoint.model, dataset, 2)
    assert torch.equal(sids, whole.sid)
    assert torch.equal(energies, parts.energy)


def test_a_process_without_a_launcher_is_alone(monkeypatch):
    """No variables in the environment, or a launcher that has started one process."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined_processes() as rank:
        assert (rank, place()) == (0, (0, 1))
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined_processes() as rank:
        assert (rank, place()) == (0, (0, 1))


def test_what_libraries_write_to_stdout_while_processes_join_goes_to_stderr(capfd):
    with _stdout_on_stderr():
        os.write(1, b"connected\n")
    os.write(1, b"result\n")
    assert capfd.readouterr() == ("result\n", "connected\n")


def test_processes_join_with_a_closed_stdout(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with _stdout_on_stderr():
        pass
