"""An ASE calculator around a `Predictor`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes

from molflt.prediction.outcome import Prediction
from molflt.prediction.predictor import Predictor


class RelaxedEnergyCalculator(Calculator):
    """Gives `atoms.get_potential_energy()` the predicted energy of the *relaxed* structure, eV.

    This is no force field. The energy belongs to the structure that a relaxation from the given positions
    would end in, not to these positions: it has no forces, is no potential energy surface, and must not drive
    an optimiser, molecular dynamics or a nudged elastic band. `get_forces` and `get_stress` raise ASE's
    `PropertyNotImplementedError`. Which energy it is (an adsorption energy, say) is in
    `predictor.energy_meaning`; it adds up with no other calculator's energies.

    Args:
        predictor: a `Predictor`, or a checkpoint (file or shipped name, or a list of them) to make one of.

    Attributes:
        prediction: the last `Prediction` in full, with its uncertainty and warnings.

    Example:
        >>> atoms.calc = RelaxedEnergyCalculator("fcc111-flt")  # doctest: +SKIP
        >>> atoms.get_potential_energy()  # doctest: +SKIP
    """

    implemented_properties = ["energy"]  # noqa: RUF012 (ASE's own attribute)

    def __init__(
        self, predictor: Predictor | str | os.PathLike[str] | Sequence[str | os.PathLike[str]], **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if not isinstance(predictor, Predictor):
            predictor = Predictor.from_checkpoint(predictor)
        self.predictor = predictor
        self.prediction: Prediction | None = None

    def check_state(self, atoms: Atoms, tol: float = 1e-15) -> list[str]:
        """What has changed since the last calculation; the tags count, which ASE itself does not look at."""
        changes = super().check_state(atoms, tol)
        if self.atoms is not None and not np.array_equal(self.atoms.get_tags(), atoms.get_tags()):
            changes = [*changes, "tags"]
        return changes

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = tuple(all_changes),
    ) -> None:
        """ASE calls this where nothing is known yet of the atoms as they are; raises `InputError` as
        `Predictor.predict`."""
        super().calculate(atoms, list(properties), list(system_changes))
        assert self.atoms is not None
        [self.prediction] = self.predictor.predict([self.atoms])
        self.results = {"energy": self.prediction.energy}
