"""What a checkpoint file from anywhere must satisfy before anything is built from it.

A file is a stranger's until it has been read: its archive may unpack to more than it is, its values may be
nested without end, and its configuration may name a network that no machine can hold. Each guard here takes
time and memory in proportion to the file and refuses the rest in one `InputError`.
"""

from __future__ import annotations

import math
import types
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from molflt.errors import InputError

MAX_VALUES = 2_000_000
"""Values in the description of a checkpoint (a training domain of 16 directions has some 10,000)."""
MAX_DEPTH = 16
MAX_TEXT = 100_000
"""Characters of a text in the description."""
SPARE_NUMBERS = 2**22
"""Numbers beyond those stored that the building of a network may work with."""
SPARE_TENSORS = 64
"""Parameters beyond twice those stored that may be made on the way and left out of the network."""
WORK_PER_NUMBER = 16
"""Numbers that the building of a network may work with for each that is stored."""


def check_archive(path: Path) -> str | None:
    """The name of an entry of a zip archive that fails its checksum; None where all are sound.

    Raises:
        InputError: entries are compressed or share their bytes, as `torch.save` never does: such a file may
            unpack to any size.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        if packed or sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise InputError(
                f"{path} is no archive as torch.save writes it; give a file that `molflt train` wrote"
            )
        return archive.testzip()


def check_plain(value: Any) -> None:
    """Refuse what is no tree of plain values of a sensible size.

    Raises:
        InputError: other types than dict (with text as keys), list, tuple, str, int, float, bool and None;
            deeper than `MAX_DEPTH`; more than `MAX_VALUES` values, each counted as often as it is referred
            to; an integer beyond 64 bits or a text beyond `MAX_TEXT`.
    """
    left = MAX_VALUES

    def visit(item: Any, depth: int) -> None:
        nonlocal left
        left -= 1
        if left < 0 or depth > MAX_DEPTH:
            raise InputError("it describes itself with too many or too deeply nested values")
        if isinstance(item, Mapping):
            for key, below in item.items():
                if not isinstance(key, str):
                    raise InputError(f"it has a {type(key).__name__} where a name is expected")
                visit(key, depth + 1)
                visit(below, depth + 1)
        elif isinstance(item, (list, tuple)):
            for below in item:
                visit(below, depth + 1)
        elif isinstance(item, int):
            if abs(item) >= 2**63:
                raise InputError("it has an integer of more than 64 bits")
        elif isinstance(item, str):
            if len(item) > MAX_TEXT:
                raise InputError(f"it has a text of {len(item)} characters")
        elif item is not None and not isinstance(item, float):
            raise InputError(f"it has a {type(item).__name__} where plain values are expected")

    visit(value, 0)


def has_type(value: Any, hint: Any) -> bool:
    """Whether a plain value is of a type such as `int`, `list[float]`, `dict[str, int]` or `int | None`.

    Integers pass as floats, bools as neither; lists pass as tuples of any length.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(has_type(value, option) for option in arguments)
    if origin is dict:
        key, item = arguments
        return isinstance(value, Mapping) and all(
            has_type(k, key) and has_type(v, item) for k, v in value.items()
        )
    if origin in (list, tuple):
        return isinstance(value, (list, tuple)) and all(has_type(item, arguments[0]) for item in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, type(None) if hint is None else hint)


def largest_integer(values: Any) -> int:
    """The largest integer in a tree of plain values, 0 where there is none."""
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        return max(map(largest_integer, values), default=0)
    return values if isinstance(values, int) else 0


def stored_numbers(tensors: Iterable[Tensor]) -> int:
    """How many numbers tensors hold in memory; one that repeats its storage counts as its storage."""
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in storages.values())


@contextmanager
def limited_building(num_tensors: int, num_numbers: int) -> Iterator[None]:
    """Within the block, building modules that outgrow so many tensors and numbers raises `InputError`.

    Refused are more parameters than twice `num_tensors` (and `SPARE_TENSORS`), which ends a stack without
    end, and any sequence of operations that asks for more numbers in all than `WORK_PER_NUMBER` times
    `num_numbers` (and `SPARE_NUMBERS`), before a tensor is allocated that would exceed it.
    """
    registered = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal registered
        registered += 1
        if registered > 2 * num_tensors + SPARE_TENSORS:
            raise InputError(f"its configuration needs more than the {num_tensors} tensors that it holds")

    handle = register_module_parameter_registration_hook(count)
    try:
        with _Allowance(WORK_PER_NUMBER * num_numbers + SPARE_NUMBERS):
            yield
    finally:
        handle.remove()


class _Allowance(TorchDispatchMode):
    """Adds up the numbers that operations make, those of the large ones before they are made."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self._left = numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        expected = _expected_numbers(func, tensors, args, kwargs)
        if expected > self._left:
            raise InputError("its configuration needs more numbers than it holds")
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and not any(result is tensor for tensor in tensors):
            self._left -= stored_numbers([result])
        return result


def _expected_numbers(func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> float:
    """How many numbers an operation is going to make where its arguments say so, else 0."""
    if torch.Tag.pointwise in func.tags:
        return math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))
    given = [*args, *kwargs.values()]
    if not tensors:
        given += [[value] for value in given if isinstance(value, (int, float))]
    sizes = [value for value in given if isinstance(value, (list, tuple)) and value]
    numbers = [math.prod(value) for value in sizes if all(isinstance(n, (int, float)) for n in value)]
    largest = float(max(numbers, default=0))
    is_view = func.is_view or func.overloadpacket.__name__.endswith("view")
    return 0.0 if is_view else largest**2 if func.overloadpacket.__name__ == "eye" else largest
