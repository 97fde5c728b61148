"""Trainings that `torchrun ... several_processes.py CONFIG FOLDER` runs in each of its processes.

Prints what only a run's processes can tell, as `name: value` lines of the first one. With `die` as a third
word the last process is killed at its third step instead.
"""

import hashlib
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from molflt.config import load_config
from molflt.errors import InputError
from molflt.training import RelaxedEnergyTraining, module, train

warnings.simplefilter("error")
warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)


class Stopped(Exception):
    """Ends a training from within."""


def tell(name, value):
    if dist.get_rank() == 0:
        print(f"{name}: {value}", flush=True)


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def digest(model):
    content = hashlib.sha256()
    for value in model.state_dict().values():
        content.update(value.numpy().tobytes())
    return content.hexdigest()


def main(path, folder):
    def config(name, *overrides):
        return load_config(path, ["--training.output", str(Path(folder) / name), *overrides])

    start = RelaxedEnergyTraining.on_train_batch_start
    end = RelaxedEnergyTraining.on_train_epoch_end
    states = []

    def recording(self):
        states.append(digest(self.model))
        end(self)

    RelaxedEnergyTraining.on_train_epoch_end = recording
    train(config("ddp"), progress=False)
    RelaxedEnergyTraining.on_train_epoch_end = end
    epochs = zip(*gathered(states), strict=True)
    tell("epochs with equal weights and frequencies", sum(len(set(same)) == 1 for same in epochs))

    train(config("repeated", "--data.train_split", "val_b", "--data.val_splits", "[val_a]"), progress=False)
    train(config("budget", "--data.max_atoms", "37"), progress=False)
    train(config("few", "--data.max_atoms", "500"), progress=False)

    def stopping(self, batch, batch_idx):
        if self.global_step == 5:
            raise Stopped
        return start(self, batch, batch_idx)

    for name in ("ddp", "fsdp"):
        resumed = config(f"resumed-{name}", "--training.strategy", name)
        RelaxedEnergyTraining.on_train_batch_start = stopping
        try:
            train(resumed, progress=False)
        except Stopped:
            RelaxedEnergyTraining.on_train_batch_start = start
            train(resumed, progress=False, resume=True)

    step_result = module.step_result

    def poisoned(model, batch, *others):
        result = step_result(model, batch, *others)
        bad = 1004 in batch.sid
        return result._replace(loss=result.loss * torch.nan) if bad else result

    module.step_result = poisoned
    message = ""
    try:
        train(config("nonfinite"), progress=False)
    except InputError as error:
        message = str(error)
    messages = gathered(message)
    tell("processes that say the same of the bad step", messages.count(messages[0]))
    tell("what they say", messages[0])


def die(path, folder):
    start = RelaxedEnergyTraining.on_train_batch_start

    def dying(self, batch, batch_idx):
        if self.global_step == 2 and self.global_rank == self.trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return start(self, batch, batch_idx)

    RelaxedEnergyTraining.on_train_batch_start = dying
    train(load_config(path, ["--training.output", folder]), progress=False)


if __name__ == "__main__":
    (die if sys.argv[3:] == ["die"] else main)(*sys.argv[1:3])
