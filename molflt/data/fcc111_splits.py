"""Which systems of `datasets/fcc111` go where: an adsorbate, a metal and whole triples are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from molflt.data.fcc111 import System

HELD_OUT_ADSORBATE = "Cl"
HELD_OUT_METAL = "Pd"
VAL_ID_SHARE = 0.15
SPLIT_SEED = 0
SPLITS = ("train", "val_id", "val_ood_ads", "val_ood_cat", "val_ood_both")
NUM_STRUCTURE_FILES = 10


def assign_splits(systems: Sequence[System]) -> dict[str, list[System]]:
    """Split by held-out adsorbate, held-out metal, and whole (metal, adsorbate, site) triples for val_id.

    val_id takes the triples whose seeded SHA-256 is lowest, so the choice depends on no random generator and
    not on the order of the source.
    """
    triples = {s.triple for s in systems if s.metal != HELD_OUT_METAL and s.adsorbate != HELD_OUT_ADSORBATE}
    count = round(VAL_ID_SHARE * len(triples))
    val_id = set(sorted(triples, key=lambda triple: _hash("-".join(triple)))[:count])

    names = {(True, False): "val_ood_ads", (False, True): "val_ood_cat", (True, True): "val_ood_both"}

    def split_of(system: System) -> str:
        held_out = (system.adsorbate == HELD_OUT_ADSORBATE, system.metal == HELD_OUT_METAL)
        if not any(held_out):
            return "val_id" if system.triple in val_id else "train"
        return names[held_out]

    splits: dict[str, list[System]] = {split: [] for split in SPLITS}
    for system in sorted(systems, key=lambda system: system.sid):
        splits[split_of(system)].append(system)
    return splits


def choose_examples(systems: Iterable[System], count: int = NUM_STRUCTURE_FILES) -> list[System]:
    """Systems to ship as files: of each metal, adsorbate and site in turn the one least shown so far."""
    chosen: list[System] = []
    remaining = sorted(systems, key=lambda system: _hash(system.name))
    keys: tuple[Callable[[System], Any], ...] = (
        lambda s: s.metal,
        lambda s: s.adsorbate,
        lambda s: s.site,
        lambda s: s.num_adsorbates,
    )
    while remaining and len(chosen) < count:
        best = min(remaining, key=lambda s: sum(key(s) == key(other) for other in chosen for key in keys))
        chosen.append(best)
        remaining.remove(best)
    return chosen


def _hash(text: str) -> str:
    return hashlib.sha256(f"{SPLIT_SEED}:{text}".encode()).hexdigest()
