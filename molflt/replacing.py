"""Single files that appear whole or not at all, whatever writes them.

`molflt.data.whole` does it for folders, and for files of libraries that put others beside them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Hidden neighbour of `path` to write to; it takes its name when the block ends, or goes if that fails.

    It ends in `.partial`. Raises what the file system does (`OSError`).
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
