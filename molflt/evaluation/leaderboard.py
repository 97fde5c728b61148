"""Files for OC20's IS2RE leaderboard: made, checked against a data set, and scored where labels are known.

A file is a NumPy archive with `<domain>_ids` and `<domain>_energy` for the domains id, ood_ads, ood_cat and
ood_both. Ids are the systems' sids as strings, as fairchem writes them; energies are float32 (float16 would
be 0.004 eV coarse at 6 eV).
"""

from __future__ import annotations

import os
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from molflt.build import build_dataset
from molflt.checkpoint import common_energy_meaning, load_checkpoint
from molflt.data.datasets import OC20IS2RE
from molflt.errors import InputError
from molflt.evaluation.predictions import SplitPredictions, predict_unlabelled
from molflt.evaluation.scores import EWT_THRESHOLD, RESAMPLES, SplitScore, score

DOMAINS = ("id", "ood_ads", "ood_cat", "ood_both")
NUM_NAMED = 3


def make_leaderboard(
    checkpoints: Sequence[str | os.PathLike[str]],
    root: str | os.PathLike[str],
    output: str | os.PathLike[str],
    part: str = "test",
    batch_size: int | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, int]:
    """Predict the four splits `<part>_<domain>` under `root`, with the mean of the checkpoints, on `device`.

    The file appears whole or not at all. Returns the number of systems per domain. Raises `InputError` where
    a split is missing, two of its systems have one id, an energy is not finite, or the file cannot be
    written.
    """
    target = Path(output)
    if target.suffix != ".npz" or not target.parent.is_dir():
        raise InputError(f"cannot write {output}; give a name that ends in .npz, in a folder that exists")
    loaded = [load_checkpoint(path) for path in checkpoints]
    common_energy_meaning(loaded)
    for domain in DOMAINS:
        OC20IS2RE(root, f"{part}_{domain}")
    arrays: dict[str, NDArray[Any]] = {}
    for domain in DOMAINS:
        split = f"{part}_{domain}"
        energies, sids = [], torch.zeros(0)
        for checkpoint in loaded:
            data = replace(checkpoint.config.data, root=os.fspath(root))
            dataset = build_dataset(data, split, False)
            sids, energy = predict_unlabelled(
                checkpoint.model.to(device), dataset, batch_size or data.batch_size
            )
            energies.append(energy.double())
        repeated = _repeated(sids.tolist())
        if repeated:
            raise InputError(f"{root}: {split} has {_named(repeated, 'ids more than once')}; mend the data")
        arrays[f"{domain}_ids"] = np.array([str(sid) for sid in sids.tolist()])
        arrays[f"{domain}_energy"] = torch.stack(energies).mean(dim=0).float().numpy()
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial.npz")
    try:
        np.savez_compressed(partial, **arrays)  # pyright: ignore[reportArgumentType]
        partial.replace(target)
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror}; give another file") from error
    finally:
        partial.unlink(missing_ok=True)
    return {domain: len(arrays[f"{domain}_ids"]) for domain in DOMAINS}


def check_leaderboard(
    path: str | os.PathLike[str], root: str | os.PathLike[str], part: str = "test"
) -> list[str]:
    """What is wrong with a file for the splits `<part>_<domain>` under `root`, a line each; nothing if fine.

    Checked are the entries, their types and lengths, NaN and infinite energies, and ids that are missing,
    extra or there more than once. Raises `InputError` where file or data cannot be read.
    """
    archive = _read(path)
    expected = {f"{domain}_{what}" for domain in DOMAINS for what in ("ids", "energy")}
    problems = [f"entry {name} is missing" for name in sorted(expected - set(archive))]
    problems += [f"entry {name} is not one of the leaderboard's" for name in sorted(set(archive) - expected)]
    for domain in DOMAINS:
        ids, energy = archive.get(f"{domain}_ids"), archive.get(f"{domain}_energy")
        known = OC20IS2RE(root, f"{part}_{domain}").sids.tolist()
        if energy is not None:
            problems += _energy_problems(domain, energy)
        if ids is not None:
            problems += _id_problems(domain, ids, known)
            if energy is not None and ids.shape != energy.shape:
                problems.append(f"{domain}: {ids.size} ids but {energy.size} energies")
    return problems


def score_leaderboard(
    path: str | os.PathLike[str],
    root: str | os.PathLike[str],
    part: str = "val",
    threshold: float = EWT_THRESHOLD,
    resamples: int = RESAMPLES,
) -> list[SplitScore]:
    """Score a file against the labels of `<part>_<domain>`; it must pass `check_leaderboard`.

    Raises:
        InputError: it does not pass (the first problem is named), or the data have no labels.
    """
    problems = check_leaderboard(path, root, part)
    if problems:
        raise InputError(
            f"{path} does not fit {root} ({part}): {problems[0]}; see `molflt leaderboard check`"
        )
    archive = _read(path)
    scores = []
    for domain in DOMAINS:
        split = f"{part}_{domain}"
        dataset = OC20IS2RE(root, split)
        energies = dict(
            zip(_int_ids(archive[f"{domain}_ids"]), archive[f"{domain}_energy"].tolist(), strict=True)
        )
        sids, targets = [], []
        for index in range(len(dataset)):
            data = dataset.get(index)
            if data.get("y_relaxed") is None:
                raise InputError(f"sid {int(data.sid)} of {split} has no y_relaxed; score labelled data")
            sids.append(int(data.sid))
            targets.append(float(data.y_relaxed))
        predictions = SplitPredictions(
            torch.tensor(sids),
            torch.tensor([energies[sid] for sid in sids], dtype=torch.float64),
            torch.tensor(targets, dtype=torch.float64),
        )
        scores.append(score(predictions, Path(path).name, split, threshold, resamples))
    return scores


def _read(path: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it is a single array")
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise InputError(f"no file {path}; give what `molflt leaderboard make` wrote") from None
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is no leaderboard file ({error}); give a .npz without pickles") from error


def _energy_problems(domain: str, energy: NDArray[Any]) -> list[str]:
    problems = []
    if energy.ndim != 1:
        problems.append(f"{domain}: energies have the shape {energy.shape} and not (n,)")
    if energy.dtype != np.float32:
        problems.append(f"{domain}: energies are {energy.dtype} and not float32")
    if energy.dtype.kind == "f" and not np.isfinite(energy).all():
        problems.append(f"{domain}: {int((~np.isfinite(energy)).sum())} energies are NaN or infinite")
    return problems


def _id_problems(domain: str, ids: NDArray[Any], known: list[int]) -> list[str]:
    try:
        found = _int_ids(ids)
    except ValueError:
        return [f"{domain}: ids are {ids.dtype} and not integers or their decimal strings"]
    problems = []
    for sids, text in (
        (sorted({*known} - {*found}), "ids are missing"),
        (sorted({*found} - {*known}), "ids are not in the data"),
        (_repeated(found), "ids are there more than once"),
    ):
        if sids:
            problems.append(f"{domain}: {_named(sids, text)}")
    return problems


def _int_ids(ids: NDArray[Any]) -> list[int]:
    if ids.ndim != 1 or ids.dtype.kind not in "iuUS":
        raise ValueError("no list of ids")
    return [int(item) for item in ids.tolist()]


def _repeated(sids: list[int]) -> list[int]:
    # Ids from a file may be larger than any integer type of NumPy.
    return sorted(sid for sid, times in Counter(sids).items() if times > 1)


def _named(sids: Sequence[int], text: str) -> str:
    first = ", ".join(map(str, sids[:NUM_NAMED]))
    return f"{len(sids)} {text} ({first}{', ...' if len(sids) > NUM_NAMED else ''})"
