"""Random numbers that depend on the configured seed and on where in the run they are drawn, on nothing else.

Before each step every global generator is seeded from (seed, rank, step), and a redraw of frequencies from
(seed, step). So nothing random has to be saved for a run to be continued anywhere, what is drawn outside of
training leaves no trace in it, and all ranks redraw alike.
"""

from __future__ import annotations

import random
from enum import IntEnum

import numpy as np
import torch


class Purpose(IntEnum):
    """What a derived seed is for."""

    REDRAW = 1
    STEP = 2


def derived_seed(seed: int, purpose: Purpose, *position: int) -> int:
    """A seed below 2**32 for `purpose` at `position` (non-negative numbers) of the run that `seed` fixes.

    Hashed by NumPy's SeedSequence, as torch's CPU generator reads the low 32 bits of a seed only: seeds that
    differ above these bits would be one.
    """
    return int(np.random.SeedSequence((seed, int(purpose), *position)).generate_state(1)[0])


def seed_step(seed: int, rank: int, step: int) -> None:
    """Seed torch's, NumPy's and Python's global generators for one training step of one rank."""
    value = derived_seed(seed, Purpose.STEP, rank, step)
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002 (the global generator is what others may draw from)
    # torch.manual_seed takes half a millisecond more where CUDA is not in use: it notes where it was called.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)


def redraw_generator(seed: int, step: int) -> torch.Generator:
    """The generator for a redraw before training step `step`, the same on all ranks."""
    return torch.Generator().manual_seed(derived_seed(seed, Purpose.REDRAW, step))
