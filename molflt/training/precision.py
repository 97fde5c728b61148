"""The precision of a training, in Lightning's words."""

from __future__ import annotations

from typing import Literal

from molflt.config import Precision
from molflt.errors import InputError

_NAMES: dict[Precision, Literal["32-true", "bf16-mixed", "16-mixed"]] = {
    32: "32-true",
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
}


def lightning_precision(
    precision: Precision, accelerator: str
) -> Literal["32-true", "bf16-mixed", "16-mixed"]:
    """Lightning's name of `training.precision`; `InputError` for fp16 on a CPU, where Lightning has none."""
    if precision == "fp16" and accelerator == "cpu":
        raise InputError("training.precision is fp16, which takes a GPU; use bf16 or 32 on a CPU")
    return _NAMES[precision]
