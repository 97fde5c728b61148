"""Several processes that score together, as `torchrun` starts them: each computes a share, all know all.

Process r of n takes the rows r, r + n, ... of a data set, so that no system is computed twice and none is
padded in, whatever their number. Batches differ with that number, and with them float32 energies by less
than 1e-5 eV. Shares and errors are exchanged through torch.distributed (gloo); what is raised on one process
is raised on all, so that none waits for another that has gone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from molflt.errors import InputError

T = TypeVar("T")

PATIENCE = timedelta(hours=6)
"""How long a process waits for the share of a slower one."""


def place() -> tuple[int, int]:
    """Number of this process, from 0, and of all; (0, 1) where it is alone."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


@contextmanager
def joined_processes() -> Iterator[int]:
    """Joins the processes that a launcher has started for the block; yields the number of this one.

    The launcher says so by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment. Without them,
    and where the processes are joined already, nothing is done.
    """
    if place()[1] > 1 or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield place()[0]
        return
    with _stdout_on_stderr():
        dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield place()[0]
    finally:
        dist.destroy_process_group()


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Sends to stderr what libraries write to stdout: before torch 2.11, gloo that it is connected."""
    if sys.stdout is None:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        with suppress(OSError):
            os.dup2(2, 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def shares(compute: Callable[[int, int], T]) -> list[T]:
    """`compute(rank, size)` of every process, in their order, known to all of them.

    Raises:
        InputError: what the first process that failed has raised, on every process.
    """
    rank, size = place()
    if size == 1:
        return [compute(0, 1)]
    outcome: Any
    try:
        outcome = compute(rank, size)
    except InputError as error:
        outcome = InputError(str(error))
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, outcome)
    for item in gathered:
        if isinstance(item, InputError):
            raise item
    return gathered
