"""The one table of every field a sample may carry, and the PyG `Data` that obeys it.

A sample is one structure: a periodic slab with adsorbates, a crystal or a molecule. Its fields are those of
the Open Catalyst 2020 LMDBs (Chanussot et al., ACS Catal. 11, 6059 (2021)) with settled types. PyG decides
from a field's *name* how to batch it ("index" in the name shifts the values by the atoms before it);
here the table decides, so a field that a user calls `miller_index` passes through a batch unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import is_sparse

from molflt.errors import InputError


class FieldSpec(NamedTuple):
    """One field: A atoms, E edges; a sample's own leading dimension of size 1 becomes the batch's B."""

    name: str
    shape: tuple[str | int, ...]
    dtype: torch.dtype
    unit: str
    meaning: str
    cat_dim: int = 0
    """Dimension along which a batch joins the field."""
    counts_atoms: bool = False
    """True where values are atom numbers, which a batch shifts by the atoms before."""


FIELDS: dict[str, FieldSpec] = {
    spec.name: spec
    for spec in (
        FieldSpec("pos", ("A", 3), torch.float32, "Å", "initial positions"),
        FieldSpec("pos_relaxed", ("A", 3), torch.float32, "Å", "relaxed positions"),
        FieldSpec("delta_pos", ("A", 3), torch.float32, "Å", "minimum image of pos_relaxed - pos"),
        FieldSpec("cell", (1, 3, 3), torch.float32, "Å", "rows are the lattice vectors"),
        FieldSpec("pbc", (1, 3), torch.bool, "", "directions that repeat"),
        FieldSpec("atomic_numbers", ("A",), torch.int64, "", "elements, 1 to 118"),
        FieldSpec("tags", ("A",), torch.int64, "", "0 subsurface, 1 surface, 2 adsorbate"),
        FieldSpec("fixed", ("A",), torch.bool, "", "true where the relaxation held the atom"),
        FieldSpec("natoms", (1,), torch.int64, "", "number of atoms A"),
        FieldSpec("sid", (1,), torch.int64, "", "the system's id"),
        FieldSpec("y_relaxed", (1,), torch.float32, "eV", "relaxed adsorption energy, the target"),
        FieldSpec("y_init", (1,), torch.float32, "eV", "energy of the initial structure, same reference"),
        FieldSpec("force", ("A", 3), torch.float32, "eV/Å", "forces on the initial structure"),
        FieldSpec(
            "edge_index", (2, "E"), torch.int64, "", "row 1 receives from row 0", cat_dim=1, counts_atoms=True
        ),
        FieldSpec("cell_offsets", ("E", 3), torch.int64, "", "lattice translation of each edge"),
        FieldSpec("distances", ("E",), torch.float32, "Å", "|pos[row 0] - pos[row 1] + cell_offsets @ cell|"),
    )
}

_PYG_OWN = frozenset({"batch", "ptr"})


class StructureData(Data):
    """A PyG `Data` whose fields batch as `FIELDS` says, whatever their names suggest.

    Fields outside the table are joined along dimension 0 and never shifted.
    """

    def __cat_dim__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        if key in _PYG_OWN or is_sparse(value):
            return super().__cat_dim__(key, value, *args, **kwargs)
        return FIELDS[key].cat_dim if key in FIELDS else 0

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        if key in _PYG_OWN:
            return super().__inc__(key, value, *args, **kwargs)
        return self.num_nodes if key in FIELDS and FIELDS[key].counts_atoms else 0


def check_same_fields(samples: Sequence[Data]) -> None:
    """Require that samples meant for one batch carry the same fields.

    PyG drops a field that the first sample lacks and fails without a name on one that another lacks.

    Raises:
        InputError: naming the first sample that differs, by its sid, and the fields.
    """
    if not samples:
        return
    expected = set(samples[0].keys())
    for position, sample in enumerate(samples):
        difference = expected.symmetric_difference(sample.keys())
        if difference:
            raise InputError(
                f"sample {position} of the batch (sid {_sid_text(sample)}) and sample 0 "
                f"(sid {_sid_text(samples[0])}) do not both have {', '.join(sorted(difference))}; "
                "batch samples with the same fields, or remove these from all"
            )


def _sid_text(sample: Data) -> str:
    sid = sample.get("sid")
    return str(int(sid)) if isinstance(sid, Tensor) and sid.numel() == 1 else "unknown"
