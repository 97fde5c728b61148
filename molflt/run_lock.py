"""One training at a time in a run folder: a lock that the system releases when its process ends, however it
ends.

It is on a file of its own, `.lock`, which a run removes at its end; one that a killed process left locks
nothing.
Record locks (`lockf`) are not passed on to forked data workers, which may outlive the run by seconds.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from molflt.errors import InputError

try:
    import fcntl
except ImportError:  # Windows, where two runs in one folder are not noticed
    fcntl = None

LOCK = ".lock"


class RunLock:
    """The right to write a run folder, taken by `acquire` and given back at the end of a `with`.

    Args:
        output: the run folder.
    """

    def __init__(self, output: Path) -> None:
        self.path = output / LOCK
        self._file: int | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            # While it is still locked, so that it is no other run's.
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def acquire(self) -> None:
        """Make the folder if need be, and lock it; nothing where this lock is taken already.

        Where the file system has no locks, or is not to be written, there is none. Raises `InputError` where
        another process has the lock, or the folder can not be made.
        """
        if fcntl is None or self._file is not None:
            return
        output = self.path.parent
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot write the run folder {output}: {error.strerror}; choose another --training.output"
            ) from error
        while self._file is None:
            try:
                file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError:
                return
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(file)
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    return
                raise InputError(
                    f"another run is writing {output}; wait for its end, stop it, or choose another "
                    "--training.output"
                ) from error
            if _is_at(file, self.path):
                self._file = file
            else:
                # The run before has just removed it.
                os.close(file)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
