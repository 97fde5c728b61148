"""Files of `torch.save`: written whole or not at all, read without running anything in them."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from molflt.checkpoint_guards import check_archive
from molflt.errors import InputError
from molflt.pretrained import pretrained_names
from molflt.replacing import replacing


def write_atomically(content: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """`torch.save` to a neighbouring file that then takes the name: `path` is whole or untouched.

    Raises `InputError` where the disk is full or can not be written.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as partial, partial.open("wb") as file:
            sink = _Sink(file)
            try:
                torch.save(dict(content), cast("IO[bytes]", sink))
            except RuntimeError:
                # torch reports what its writer met as a state of its own.
                if sink.error is None:
                    raise
                raise sink.error from None
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        intact = ", the one written before is intact" if target.exists() else ""
        raise InputError(
            f"cannot write {target}: {error.strerror}{intact}; make room there (a training run then goes on "
            "with --resume)"
        ) from error


class _Sink:
    """A file as `torch.save` needs it, which remembers why it could not be written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        try:
            self.file.flush()
        except OSError as error:
            self.error = error
            raise


def read_archive(path: Path) -> Mapping[str, Any]:
    """What is in a `torch.save` file of plain values and tensors, on the CPU, its checksums verified.

    Raises `InputError` for a file that is missing, cut, altered or foreign.
    """
    try:
        if path.is_dir():
            raise InputError(
                f"{path} is a folder; give a checkpoint file, such as checkpoints/best.ckpt in a run folder"
            )
        path.open("rb").close()
    except FileNotFoundError:
        shipped = ", ".join(pretrained_names())
        or_shipped = f", or the name of a shipped one ({shipped})" if shipped else ""
        raise InputError(
            f"no checkpoint at {path}; give a file that `molflt train` wrote{or_shipped}"
        ) from None
    except OSError as error:
        raise InputError(f"cannot read the checkpoint {path}: {error.strerror}") from error
    unreadable = (
        f"{path} is no checkpoint, or a cut one; copy it again or give a file that `molflt train` wrote"
    )
    if not zipfile.is_zipfile(path):
        raise InputError(unreadable)
    # Reading hostile bytes can fail in any way; whatever it is, the file is at fault.
    try:
        damaged = check_archive(path)
        content = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except Exception as error:
        raise InputError(unreadable) from error
    if damaged:
        raise InputError(f"{path} is damaged: {damaged} fails its checksum; copy it again from its source")
    if not isinstance(content, Mapping):
        raise InputError(f"{path} is no molflt checkpoint; give one that `molflt train` wrote")
    return content
