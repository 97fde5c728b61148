"""OC20 IS2RE (initial structure to relaxed energy) as a PyG `Dataset`, and any set in the same format."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, Dataset

from molflt.data.fields import StructureData
from molflt.data.lmdb import RecordReader
from molflt.data.records import normalize_record
from molflt.data.sizes import KEEP_FROM, RecordSizes, graph_edges, record_sizes
from molflt.errors import InputError

_DOMAINS = ("id", "ood_ads", "ood_cat", "ood_both")
SPLIT_ORDER = ("train", *(f"{part}_{domain}" for part in ("val", "test") for domain in _DOMAINS))
"""OC20's split names in OC20's order."""


class OC20IS2RE(Dataset):
    """Systems of an OC20-format LMDB: `dataset[i]` is a `StructureData` with the fields of `FIELDS`.

    Behaves as every PyG data set: slices, index tensors, `transform`, PyG's and torch's data loaders. Labels,
    tags and edges are present where the records have them; all records must agree with the first on
    which fields they have, so that a batch never loses one silently.

    Args:
        root: the LMDB (file or folder), or the folder that holds one per split.
        split: name of a folder or of a `.lmdb` file under `root`; None where `root` is the LMDB itself.
        transform: applied to each sample when it is read.

    Raises:
        InputError: the split does not exist (the ones that do are named), or as `RecordReader`.

    Example:
        >>> from molflt.testing import write_toy_lmdb
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = write_toy_lmdb(folder + "/data.lmdb", num_records=3)
        ...     OC20IS2RE(path)[0].y_relaxed.shape
        torch.Size([1])
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: str | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.path = find_split(root, split)
        self._reader = RecordReader(self.path)
        self._expected: frozenset[str] | None = None
        self._sizes: RecordSizes | None = None
        super().__init__(root=str(root), transform=transform)

    def len(self) -> int:
        """Number of records."""
        return len(self._reader)

    def get(self, idx: int) -> StructureData:
        """Record `idx`, before `transform`."""
        record, name = self._reader.read(idx)
        data = normalize_record(record, name, default_sid=idx)
        if self._expected is None:
            self._expected = frozenset(data.keys()) if idx == 0 else self._table_fields(0)
        self._check_fields(data, name)
        return data

    @property
    def sizes(self) -> RecordSizes:
        """Id, atoms and edges of each sample of this data set (or slice of one), without reading them."""
        if self._sizes is None:
            self._sizes = record_sizes(self._reader, progress=len(self._reader) >= KEEP_FROM)
        rows = self._rows()
        return RecordSizes(*(column[rows] for column in self._sizes))

    def edge_counts(self, settings: str) -> Tensor:
        """Edges of each sample after `transform`, int64 [N]; large data sets are read for it only once.

        Args:
            settings: what the transform's graph depends on, in words: counts kept for others are not used.
        """

        def count(index: int) -> int:
            sample = self.get(index)
            return (sample if self.transform is None else self.transform(sample))["edge_index"].shape[1]

        counts = graph_edges(self._reader, count, settings, progress=len(self._reader) >= KEEP_FROM)
        return counts[self._rows()]

    def _rows(self) -> Tensor:
        return torch.as_tensor(list(self.indices()), dtype=torch.int64)

    @property
    def sids(self) -> Tensor:
        """The samples' ids, int64 [N]."""
        return self.sizes.sid

    def _table_fields(self, idx: int) -> frozenset[str]:
        record, name = self._reader.read(idx)
        return frozenset(normalize_record(record, name, default_sid=idx).keys())

    def _check_fields(self, data: Data, name: str) -> None:
        assert self._expected is not None
        difference = sorted(self._expected.symmetric_difference(data.keys()))
        if difference:
            sid = int(data["sid"])
            raise InputError(
                f"{name} (sid {sid}) differs from the first record in having {', '.join(difference)}; the "
                "records of a data set carry the same fields: make one set for each kind"
            )


def find_split(root: str | os.PathLike[str], split: str | None) -> Path:
    """Where a split lies under `root`: `root/split`, or `root/split.lmdb`; `root` itself for None.

    Raises:
        InputError: there is none; the message lists those there are.
    """
    root = Path(root)
    if not root.exists():
        raise InputError(f"{root} does not exist; give the data set's folder or LMDB file")
    if split is None:
        return root
    for path in (root / split, root / f"{split}.lmdb"):
        if path.exists():
            return path
    splits = list_splits(root)
    found = f"it has {', '.join(splits)}" if splits else "it holds no splits"
    raise InputError(f"{root} has no split {split!r}; {found}")


def list_splits(root: str | os.PathLike[str]) -> list[str]:
    """Names of the splits under `root`, OC20's order first: folders with LMDB files, and `.lmdb` files."""
    root = Path(root)
    if not root.is_dir():
        return []
    folders = [p.name for p in root.iterdir() if p.is_dir() and p.suffix != ".lmdb" and any(p.glob("*.lmdb"))]
    found = {*folders, *(path.stem for path in root.glob("*.lmdb"))}
    known = [split for split in SPLIT_ORDER if split in found]
    return known + sorted(found.difference(known))
