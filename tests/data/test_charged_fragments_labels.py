"""Coulomb energies agree with what is known in closed form."""

import numpy as np
import pytest

from molflt.data.charged_fragments_labels import (
    COULOMB,
    fragment_energy,
    open_energy,
    sheet_energy,
    smallest_separation,
)

SPACING = 2.8
CHECKERBOARD = np.array([[0.0, 0.0, 0.0], [SPACING, 0.0, 0.0]])
CHECKERBOARD_CELL = np.array([[SPACING, SPACING, 0.0], [SPACING, -SPACING, 0.0], [0.0, 0.0, 9.0]])
STACKING = np.array([SPACING, 0.0, SPACING])
SQUARE_SHEET = 1.6155426267
"""Madelung constant of the square lattice of alternating charges."""
ROCK_SALT = 1.7475645946
"""Madelung constant of NaCl."""


def test_two_charges_in_open_boundaries():
    pos = np.array([[1.0, 2.0, -3.0], [1.0, 5.0, 1.0]])
    assert open_energy(np.array([1.0, -2.0]), pos) == pytest.approx(-2 * 14.3996454784 / 5, rel=1e-9)


def test_three_charges_sum_over_pairs():
    pos = np.array([[0.0, 0.0, 0.0], [3.0, 0.0, 0.0], [0.0, 4.0, 0.0]])
    expected = COULOMB * (-1 / 3 - 1 / 4 + 1 / 5)
    assert open_energy(np.array([-1.0, 1.0, 1.0]), pos) == pytest.approx(expected, rel=1e-12)


def test_a_fragment_alone_has_its_own_pairs_only():
    pos = np.array([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    energy = fragment_energy(np.array([1.0, 1.0, -1.0]), pos, np.array([0, 1, 0]))
    assert energy == pytest.approx(-COULOMB / 2, rel=1e-12)


def test_a_sheet_of_alternating_charges_has_its_madelung_constant():
    energy = sheet_energy(np.array([1.0, -1.0]), CHECKERBOARD, CHECKERBOARD_CELL)
    assert -energy * SPACING / COULOMB == pytest.approx(SQUARE_SHEET, abs=1e-6)


def test_adding_a_layer_to_rock_salt_costs_its_madelung_constant():
    """Layers further apart than a few are neutral to each other, so the last one sees bulk on both sides."""

    def slab(layers: int) -> float:
        pos = np.vstack([CHECKERBOARD + n * STACKING for n in range(layers)])
        return sheet_energy(np.tile([1.0, -1.0], layers), pos, CHECKERBOARD_CELL)

    per_pair = slab(5) - slab(4)
    assert -per_pair * SPACING / COULOMB == pytest.approx(ROCK_SALT, abs=1e-5)


def test_two_charged_planes_are_a_plate_capacitor():
    """Moving them apart by x costs 2 pi k q^2 x / area, once they are further apart than they are coarse."""
    cell = np.diag([3.0, 3.0, 1.0])
    charges = np.array([1.0, -1.0])
    near, far = (
        sheet_energy(charges, np.array([[0.0, 0.0, 0.0], [1.0, 2.0, height]]), cell) for height in (9.0, 14.0)
    )
    assert far - near == pytest.approx(2 * np.pi * COULOMB * 5.0 / 9.0, abs=1e-4)


def test_more_vacuum_changes_nothing():
    rng = np.random.default_rng(5)
    cell = np.array([[19.0, 0.0, 0.0], [3.0, 21.0, 0.0], [0.0, 0.0, 1.0]])
    pos = np.hstack([rng.random((6, 2)) @ cell[:2, :2], rng.uniform(-2, 2, (6, 1))])
    charges = np.array([1.0, -1.0] * 3)
    first, second = (sheet_energy(charges, pos, cell, vacuum=vacuum) for vacuum in (3.0, 6.0))
    assert first == pytest.approx(second, abs=1e-4)


def test_charged_and_tilted_sheets_are_refused():
    with pytest.raises(ValueError, match="sum to 0"):
        sheet_energy(np.array([1.0, 1.0]), CHECKERBOARD, CHECKERBOARD_CELL)
    with pytest.raises(ValueError, match="no z component"):
        sheet_energy(np.array([1.0, -1.0]), CHECKERBOARD, CHECKERBOARD_CELL + 0.1)


def test_separation_looks_across_the_cell_and_not_within_a_fragment():
    pos = np.array([[0.5, 0.0, 0.0], [1.5, 0.0, 0.0], [6.5, 0.0, 0.0]])
    fragment = np.array([0, 0, 1])
    assert smallest_separation(pos, fragment) == pytest.approx(5.0)
    assert smallest_separation(pos, fragment, np.diag([8.0, 11.0, 1.0])) == pytest.approx(2.0)
    assert smallest_separation(pos[:1], fragment[:1], np.diag([8.0, 11.0, 1.0])) == pytest.approx(8.0)
