"""What the systems of a split are, so that errors can be looked at by kind of system."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ase.data import chemical_symbols
from ase.formula import Formula
from torch_geometric.data import Data

SIZE_BOUNDS = (20, 40, 80, 160)


@dataclass(frozen=True)
class System:
    """One system in words."""

    sid: int
    formula: str
    num_atoms: int
    elements: tuple[str, ...]
    """Symbols, by atomic number."""
    adsorbate: str
    """Formula of the atoms with tag 2, all adsorbates of the system together; `none` without."""
    metal: str
    """Elements of all other atoms, such as `Cu-Pt`, in the order of the alphabet."""
    tags: str
    """Tags that occur, such as `0 1 2`; `none` where the data set has none."""
    num_adsorbed: int
    """Number of atoms with tag 2."""


def describe_system(data: Data) -> System:
    """One record in words."""
    numbers, tags = data.atomic_numbers.tolist(), data.get("tags")
    tags = None if tags is None else tags.tolist()
    adsorbed = [z for z, tag in zip(numbers, tags, strict=True) if tag == 2] if tags is not None else []
    others = [z for z, tag in zip(numbers, tags, strict=True) if tag != 2] if tags is not None else numbers
    return System(
        sid=int(data.sid),
        formula=_formula(numbers),
        num_atoms=len(numbers),
        elements=tuple(chemical_symbols[z] for z in sorted({*numbers})),
        adsorbate=_formula(adsorbed) if adsorbed else "none",
        metal="-".join(sorted({chemical_symbols[z] for z in others})) or "none",
        tags="none" if tags is None else " ".join(map(str, sorted({*tags}))),
        num_adsorbed=len(adsorbed),
    )


def describe_systems(records: Iterable[Data]) -> list[System]:
    """Records in words, in order."""
    return [describe_system(record) for record in records]


def size_range(num_atoms: int) -> str:
    """The range of sizes that a system falls in, such as `41-80`."""
    lower = 0
    for upper in SIZE_BOUNDS:
        if num_atoms <= upper:
            return f"{lower + 1}-{upper}"
        lower = upper
    return f">{lower}"


def tag_group(system: System) -> str:
    """The tags that occur in a system and how many atoms are adsorbed, such as `0 1 2, 3 of tag 2`."""
    return f"{system.tags}, {system.num_adsorbed} of tag 2" if system.num_adsorbed else system.tags


GROUPINGS: Mapping[str, Callable[[System], Sequence[str]]] = {
    "element": lambda system: system.elements,
    "adsorbate": lambda system: (system.adsorbate,),
    "metal": lambda system: (system.metal,),
    "size": lambda system: (size_range(system.num_atoms),),
    "tag": lambda system: (tag_group(system),),
}
"""What errors can be broken down by; a system is in the group of each of its elements. `tag` tells records
without tags or adsorbate from others, and systems by the number of their adsorbed atoms."""


def grouped(systems: Sequence[System], grouping: str) -> dict[str, list[int]]:
    """Group to the rows of its systems; the largest group first, then by name."""
    groups: dict[str, list[int]] = {}
    for row, system in enumerate(systems):
        for group in GROUPINGS[grouping](system):
            groups.setdefault(group, []).append(row)
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])))


def _formula(numbers: Sequence[int]) -> str:
    return Formula.from_list([chemical_symbols[z] for z in numbers]).format("hill")
