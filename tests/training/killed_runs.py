"""Trains in children that are killed again and again: `python killed_runs.py CONFIG FOLDER KILLS SEED`.

One process imports everything and forks the trainings, as starting Python 20 times would take minutes. A
child kills itself with SIGKILL, which no code can intercept, at a drawn training step or at a drawn write to
a checkpoint file. Prints a line for each, and one for the child that finishes the run.
"""

import os
import random
import signal
import sys
import warnings

from molflt import archive
from molflt.config import load_config
from molflt.training import RelaxedEnergyTraining, train

warnings.simplefilter("ignore")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_until(config, steps: int, writes: int | None) -> None:
    """Continue the run; die before the step after `steps` steps, or in the middle of a write."""
    start, write = RelaxedEnergyTraining.on_train_batch_start, archive._Sink.write
    counts = {"steps": 0, "writes": 0}

    def counted_start(self, batch, batch_idx):
        if writes is None and counts["steps"] == steps:
            kill()
        counts["steps"] += 1
        return start(self, batch, batch_idx)

    def counted_write(self, data):
        counts["writes"] += 1
        if counts["writes"] == writes:
            half = bytes(data)[: len(bytes(data)) // 2]
            write(self, half)
            self.flush()
            kill()
        return write(self, data)

    RelaxedEnergyTraining.on_train_batch_start = counted_start
    archive._Sink.write = counted_write
    train(config, resume=True, progress=False)


def main(config_path: str, output: str, kills: int, seed: int) -> None:
    config = load_config(config_path, ["--training.output", output])
    draw = random.Random(seed)
    died, finished = 0, False
    while not finished:
        # The last child of all is left alone.
        steps = draw.randrange(0, 4) if died < kills else 10**9
        writes = draw.randrange(1, 400) if died < kills and draw.random() < 0.3 else None
        child = os.fork()
        if child == 0:
            try:
                train_until(config, steps, writes)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            died += 1
            print("killed", "write" if writes else "step", flush=True)
        else:
            assert os.WEXITSTATUS(status) == 0
            finished = True
            print("finished", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
