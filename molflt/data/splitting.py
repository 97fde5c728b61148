"""Splits an OC20-format LMDB into several, by chance or so that whole groups stay on one side.

A random split asks how a model does on more of the same. Where systems come in families (one slab with many
placements, one composition in many cells), it lets near copies of training systems into the test set; keeping
whole groups together does not. Groups are given to splits in an order that a seeded hash of their name fixes,
each to the split that is furthest below its share; so a split depends on the seed and the data, not on the
order of the records.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from molflt.data.copying import copied_record
from molflt.data.datasets import SPLIT_ORDER
from molflt.data.fields import StructureData
from molflt.data.lmdb import RecordReader
from molflt.data.lmdb_writer import write_entries
from molflt.data.records import normalize_record
from molflt.data.sizes import KEEP_FROM, content_fingerprint, record_sizes
from molflt.data.whole import PARTIAL, check_destination, whole_folder
from molflt.errors import InputError

HELD_OUT = "held_out"
"""Split of the systems with an element that is held out."""
GROUPINGS = ("sid", "formula", "elements", "catalyst", "adsorbate")
"""What may stay together: an id; one chemical formula; one set of elements; one composition of the slab
(tags 0 and 1, in lowest terms); one adsorbate (the formula of tag 2)."""
REPORT_NAME = "splits.json"


@dataclass
class SplitReport:
    """What a split did."""

    counts: dict[str, int]
    """Split to its number of systems."""
    groups: dict[str, int]
    """Split to its number of groups."""
    path: Path
    """The folder that holds the splits."""

    def lines(self) -> list[str]:
        """The report for a terminal."""
        total = sum(self.counts.values())
        return [
            f"{self.path / name}: {count} systems ({100 * count / total:.1f} %), {self.groups[name]} groups"
            for name, count in self.counts.items()
        ]


def split_lmdb(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    fractions: Mapping[str, float],
    *,
    by: str = "sid",
    hold_out: Collection[str] = (),
    seed: int = 0,
    overwrite: bool = False,
    progress: bool = False,
) -> SplitReport:
    """Write each split as `destination/<split>/data.0000.lmdb`, and `splits.json` that says how it was made.

    Records are copied as they are. Systems of one id are in one split, whatever `by` says. The folder appears
    whole or not at all.

    Args:
        source: an LMDB file or folder of shards.
        destination: folder to make.
        fractions: split name to its share of the systems; they add up to 1.
        by: one of `GROUPINGS`: what stays together.
        hold_out: element symbols; systems with any of them are the split `held_out`, and the rest is shared.
        seed: fixes the choice.
        overwrite: replace what is at `destination`.
        progress: show a progress bar on stderr.

    Raises:
        InputError: bad fractions, grouping or element; tags are needed and missing; a split would be empty; a
            record that is damaged; a destination that is taken or cannot be written.
    """
    source, destination = Path(source), Path(destination)
    _check_fractions(fractions, bool(hold_out))
    held = _atomic_numbers(hold_out)
    if by not in GROUPINGS:
        raise InputError(f"there is no grouping {by!r}; give one of {', '.join(GROUPINGS)}")
    check_destination(destination, overwrite)
    if destination.exists() and source.resolve().is_relative_to(destination.resolve()):
        raise InputError(
            f"{source} lies in the destination, which would replace it; give another destination"
        )
    reader = RecordReader(source)
    groups, held_out = _group(reader, by, held, progress)
    members = assign_groups(groups[~held_out].tolist(), fractions, seed)
    rows = np.flatnonzero(~held_out)
    splits = {name: rows[chosen] for name, chosen in members.items()}
    if held:
        splits[HELD_OUT] = np.flatnonzero(held_out)
    for name, chosen in splits.items():
        if not len(chosen):
            raise InputError(
                f"split {name!r} would hold no system: {len(reader)} systems in "
                f"{len(set(groups.tolist()))} groups cannot be shared so; choose other fractions, "
                "another grouping or other elements"
            )
    report = SplitReport(
        {name: len(chosen) for name, chosen in splits.items()},
        {name: len(set(groups[chosen].tolist())) for name, chosen in splits.items()},
        destination,
    )
    how = {
        "source": source.name,
        "fingerprints": [content_fingerprint(file) for file in reader.files],
        "by": by,
        "hold_out": sorted(hold_out),
        "seed": seed,
        "fractions": dict(fractions),
        "systems": report.counts,
        "groups": report.groups,
    }
    with whole_folder(destination) as folder:
        for name, chosen in splits.items():
            path = folder / name / f"data.0000.lmdb{PARTIAL}"
            indices = _tracked(chosen.tolist(), f"Writing {name}", progress)
            write_entries(path, (copied_record(reader, index)[0] for index in indices))
        (folder / f"{REPORT_NAME}{PARTIAL}").write_text(json.dumps(how, indent=1) + "\n", encoding="utf-8")
    return report


def assign_groups(groups: Sequence[str], fractions: Mapping[str, float], seed: int) -> dict[str, np.ndarray]:
    """Share out systems, whole groups at a time.

    Args:
        groups: [N] name of each system's group.
        fractions: split name to its share.
        seed: fixes the order in which groups are given away.

    Returns:
        Split name to the positions of its systems, ascending. With groups of one system each the sizes are
        the shares of N, rounded.
    """
    sizes = Counter(groups)
    missing = {name: share * len(groups) for name, share in fractions.items()}
    split_of: dict[str, str] = {}
    for group in sorted(sizes, key=lambda group: hashlib.sha256(f"{seed}:{group}".encode()).digest()):
        split = max(missing, key=lambda name: missing[name])
        split_of[group] = split
        missing[split] -= sizes[group]
    chosen = np.array([split_of[group] for group in groups])
    return {name: np.flatnonzero(chosen == name) for name in fractions}


def _group(
    reader: RecordReader, by: str, held: frozenset[int], progress: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Each record's group, those that share an id merged, and whether it or another of its id is held out."""
    held_out = np.zeros(len(reader), dtype=bool)
    if by == "sid" and not held:
        sids = record_sizes(reader, progress=progress and len(reader) >= KEEP_FROM).sid.numpy()
        return sids.astype(str), held_out
    sids = np.zeros(len(reader), dtype=np.int64)
    names: list[str] = []
    for index in _tracked(list(range(len(reader))), "Reading compositions", progress):
        record, name = reader.read(index)
        data = normalize_record(record, name, default_sid=index)
        sids[index] = int(data.sid)
        names.append(group_name(data, by, name))
        held_out[index] = not held.isdisjoint(data.atomic_numbers.tolist())
    held_out = np.isin(sids, sids[held_out])
    return np.array(_merged(names, sids.tolist())), held_out


def group_name(data: StructureData, by: str, where: str = "record") -> str:
    """Name of the group that a structure belongs to.

    Raises:
        InputError: the grouping needs tags, and the structure has none, or no atom of the wanted tag.
    """
    numbers = data.atomic_numbers
    if by == "sid":
        return str(int(data.sid))
    if by == "elements":
        return _formula(Counter(set(numbers.tolist())))
    if by == "formula":
        return _formula(Counter(numbers.tolist()))
    if "tags" not in data:
        raise InputError(f"{where} has no tags, which tell {by} from the rest; split by formula or elements")
    is_adsorbate = data.tags == 2
    counts = Counter(numbers[is_adsorbate if by == "adsorbate" else ~is_adsorbate].tolist())
    if by == "adsorbate":
        return _formula(counts)
    divisor = math.gcd(*counts.values()) or 1
    return _formula(Counter({number: count // divisor for number, count in counts.items()}))


def _formula(counts: Counter[int]) -> str:
    from ase.data import chemical_symbols

    parts = (f"{chemical_symbols[n]}{counts[n] if counts[n] > 1 else ''}" for n in sorted(counts))
    return "".join(parts) or "none"


def _merged(names: list[str], sids: list[int]) -> list[str]:
    """Groups in which one id occurs become one, named after the lowest of them."""
    parent = {name: name for name in names}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    first: dict[int, str] = {}
    for name, sid in zip(names, sids, strict=True):
        low, high = sorted((root(first.setdefault(sid, name)), root(name)))
        parent[high] = low
    return [root(name) for name in names]


def _check_fractions(fractions: Mapping[str, float], with_held_out: bool) -> None:
    for name, share in fractions.items():
        if not name or name.startswith(".") or Path(name).name != name or name.endswith(".lmdb"):
            raise InputError(f"{name!r} is no name for a split's folder; give one such as {SPLIT_ORDER[0]!r}")
        if name == HELD_OUT and with_held_out:
            raise InputError(f"{HELD_OUT!r} is the split of the held-out elements; name this one otherwise")
        if not (math.isfinite(share) and share > 0):
            raise InputError(f"split {name!r} has the share {share:g}; shares are positive and add up to 1")
    if abs(sum(fractions.values()) - 1) > 1e-6:
        raise InputError(
            f"the shares of the splits add up to {sum(fractions.values()):g}, not 1; give each system a place"
        )


def parse_fractions(text: str) -> dict[str, float]:
    """Split names and shares from `train=0.8,val=0.1,test=0.1`.

    Raises:
        InputError: it is not of that form.
    """
    fractions: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = (word.strip() for word in part.partition("="))
        try:
            number = float(share)
        except ValueError:
            raise InputError(
                f"{part.strip()!r} is no share of a split; write name=0.8, names by commas"
            ) from None
        if name in fractions:
            raise InputError(f"split {name!r} is given twice; give each a name of its own")
        fractions[name] = number
    return fractions


def _atomic_numbers(symbols: Collection[str]) -> frozenset[int]:
    from ase.data import atomic_numbers

    for symbol in symbols:
        if not atomic_numbers.get(symbol):
            raise InputError(f"{symbol!r} is no element to hold out; give symbols such as Pd")
    return frozenset(atomic_numbers[symbol] for symbol in symbols)


def _tracked(indices: list[int], text: str, progress: bool) -> Any:
    if not progress:
        return indices
    from rich.console import Console
    from rich.progress import track

    return track(indices, description=text, console=Console(stderr=True))
