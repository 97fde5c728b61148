"""Running out of memory, said in terms of the batch that was too much and of the setting to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from molflt.config import DataConfig
from molflt.errors import InputError

_PHRASES = ("out of memory", "can't allocate memory", "not enough memory")
_SHOWN_SIDS = 8
_ANEW = "in a new run (training.init_from starts it from this one's weights)"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of a GPU or of the machine, did not suffice."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _PHRASES)


def describe_out_of_memory(batch: Any, config: DataConfig) -> str:
    """One line that names a batch by its systems, and the setting to lower.

    Args:
        batch: PyG batch; None where memory ran out between batches.
        config: what made the batch.
    """
    if batch is None:
        return (
            "out of memory outside a batch; lower training.cache_gib, with which --resume goes on, or "
            f"{_knob(config)} {_ANEW}"
        )
    sids = batch.sid.tolist() if "sid" in batch else []
    shown = f" (sids {', '.join(map(str, sids[:_SHOWN_SIDS]))}" if sids else ""
    if sids:
        shown += f" and {len(sids) - _SHOWN_SIDS} more)" if len(sids) > _SHOWN_SIDS else ")"
    count = batch.num_graphs
    systems = f"{count} system{'' if count == 1 else 's'}"
    knob = _knob(config) if count > 1 else "data.radius, data.max_neighbors or the sizes under model"
    return (
        f"out of memory on a batch of {systems}, {len(batch.atomic_numbers)} atoms and "
        f"{batch.edge_index.shape[1]} edges{shown}; lower {knob} {_ANEW}"
    )


def _knob(config: DataConfig) -> str:
    for name in ("max_atoms", "max_edges"):
        if (value := getattr(config, name)) is not None:
            return f"data.{name} = {value}"
    return f"data.batch_size = {config.batch_size}"


class OutOfMemoryReport(Callback):
    """Knows the batch in work, and makes running out of memory in `told` an `InputError` that names it."""

    def __init__(self, config: DataConfig) -> None:
        super().__init__()
        self.config = config
        self.batch: Any = None

    @contextmanager
    def told(self) -> Iterator[None]:
        """Put the training in this context."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise InputError(describe_out_of_memory(self.batch, self.config)) from error
        finally:
            self.batch = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.batch = None

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> None:
        self.batch = batch

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.batch = None
