"""Seeds derived from where in a run they are used."""

import random

import numpy as np
import torch

from molflt.training.seeds import Purpose, derived_seed, redraw_generator, seed_step


def test_derived_seeds_depend_on_all_they_are_made_from():
    """Seed, purpose and each part of the position; no two of 686 are equal."""
    values = {
        derived_seed(seed, purpose, rank, step)
        for seed in (0, 1, 7, 2**32 - 1)
        for purpose in Purpose
        for rank in range(7)
        for step in range(7)
    }
    assert len(values) == 4 * 2 * 7 * 7
    assert all(0 <= value < 2**32 for value in values)


def test_a_step_has_its_own_numbers_whatever_was_drawn_before():
    """From torch, NumPy and Python; another step has others."""

    def draw():
        return torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002

    seed_step(3, 0, 5)
    first = draw()
    draw()
    seed_step(3, 0, 5)
    assert draw() == first
    seed_step(3, 0, 6)
    assert not set(draw()) & set(first)


def test_redraws_differ_between_seeds_and_steps():
    """torch's generator takes in 32 bits: a seed in higher ones would have no effect."""
    draws = [
        torch.randn(3, generator=redraw_generator(seed, step)).tolist()
        for seed, step in ((0, 1), (1, 1), (1, 2), (1, 1))
    ]
    assert draws[1] == draws[3]
    assert draws[0] != draws[1] != draws[2]
