"""What a run was made from: data by content, versions of packages, state of the source tree."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import molflt
from molflt.config import DataConfig
from molflt.data.datasets import find_split
from molflt.data.lmdb import RecordReader
from molflt.data.sizes import content_fingerprint

PACKAGES = (
    "molflt",
    "torch",
    "torch-geometric",
    "lightning",
    "torchmetrics",
    "numpy",
    "vesin",
    "ase",
    "lmdb",
)


def data_fingerprints(config: DataConfig) -> dict[str, str]:
    """Split to SHA-256 over the fingerprints of its files (`molflt.data.sizes.content_fingerprint`)."""
    fingerprints = {}
    for split in (config.train_split, *config.val_splits):
        digest = hashlib.sha256()
        for file in RecordReader(find_split(config.root, split)).files:
            digest.update(content_fingerprint(file).encode())
        fingerprints[split] = digest.hexdigest()
    return fingerprints


def provenance(data: dict[str, str]) -> dict[str, Any]:
    """What versions.json holds: Python, platform, packages, git state if any, and the data's fingerprints."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": packages,
        "git": git_state(Path(molflt.__file__).parent),
        "data": data,
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the work tree that `folder` is in, and whether tracked files differ from it; None if none."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    try:
        # An installed package below some other project's work tree is none of that project's files.
        git("ls-files", "--error-unmatch", "__init__.py")
        return {
            "commit": git("rev-parse", "HEAD"),
            "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None
