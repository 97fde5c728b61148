"""The ASE calculator: the predictor's energy, and nothing that would make it a force field."""

import pytest
from ase.build import add_adsorbate, fcc111
from ase.calculators.calculator import PropertyNotImplementedError

from molflt.prediction import RelaxedEnergyCalculator


@pytest.fixture
def slab():
    atoms = fcc111("Au", (2, 2, 3), vacuum=7.0)
    add_adsorbate(atoms, "C", 1.5, "fcc")
    atoms.set_tags([0] * 8 + [1] * 4 + [2])
    return atoms


def test_the_energy_is_the_predictors(slab, small_predictor):
    """Also after the atoms have moved or other tags were set; the prediction in full is there."""
    [expected] = small_predictor.predict([slab])
    slab.calc = RelaxedEnergyCalculator(small_predictor)
    energies = [slab.get_potential_energy()]
    assert energies[0] == expected.energy
    assert slab.calc.prediction == expected
    slab.positions[-1, 2] += 0.3
    energies.append(slab.get_potential_energy())
    slab.set_tags([0] * 4 + [1] * 8 + [2])
    energies.append(slab.get_potential_energy())
    assert energies[1:] == [small_predictor.predict([atoms])[0].energy for atoms in _moved(slab)]
    assert len(set(energies)) == 3


def _moved(slab):
    """The slab after the move, with its tags before and after."""
    before = slab.copy()
    before.set_tags([0] * 8 + [1] * 4 + [2])
    return before, slab.copy()


def test_nothing_is_computed_twice(slab, small_predictor, monkeypatch):
    """As long as nothing changes."""
    slab.calc = RelaxedEnergyCalculator(small_predictor)
    energy = slab.get_potential_energy()
    monkeypatch.setattr(type(small_predictor), "predict", lambda *arguments: pytest.fail("computed again"))
    assert slab.get_potential_energy() == energy


def test_it_has_no_forces(slab, small_predictor):
    """Forces and stress are refused in ASE's own way."""
    slab.calc = RelaxedEnergyCalculator(small_predictor)
    with pytest.raises(PropertyNotImplementedError):
        slab.get_forces()
    with pytest.raises(PropertyNotImplementedError):
        slab.get_stress()


def test_it_is_made_of_a_checkpoint_by_name_or_file(slab, finished_run):
    """The path of a checkpoint will do."""
    slab.calc = RelaxedEnergyCalculator(finished_run.best_checkpoint)
    assert slab.get_potential_energy() == slab.calc.predictor.predict([slab.copy()])[0].energy
