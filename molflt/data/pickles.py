"""Safe unpickling of data records: PyG `Data` of any age becomes a plain dict of tensors and numbers.

OC20's LMDBs hold pickled PyG objects, most of them written by PyG 1.x, whose state PyG 2 cannot use. A
pickle can also run any program. So records go through `pickle_machine`, which runs nothing, and this module
gives a meaning to the few names that data needs:

- `Data` of PyG 1.x (fields flat in its state) and 2.x (fields in a `GlobalStorage`), read as containers;
- tensors, whose storage is itself a torch stream with three pickles, a key list and the raw numbers; the
  stream goes through the same machine, so it can hold weights and nothing else;
- NumPy arrays and scalars as NumPy 1 and 2 write them, of numbers and fixed-width strings only;
- `OrderedDict`.

Any other name is refused, and the error says which.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from molflt.data.pickle_machine import Call, Global, PersistentId, PickleError, RefusedName, read_pickle
from molflt.data.torch_stream import read_storage
from molflt.errors import InputError

_DATA = ("torch_geometric.data.data", "Data")
_PYG_NAMES = {
    _DATA,
    ("torch_geometric.data.data", "DataEdgeAttr"),
    ("torch_geometric.data.data", "DataTensorAttr"),
    ("torch_geometric.data.storage", "GlobalStorage"),
}
_REBUILD_TENSOR = ("torch._utils", "_rebuild_tensor_v2")
_LOAD_STORAGE = ("torch.storage", "_load_from_bytes")
_MAX_EXPANDED = 1 << 16
"""Most elements of a tensor that repeats its storage's; strides of zero could ask for any number."""


def load_record(blob: bytes, where: str = "record") -> dict[str, Any]:
    """Unpickle one data record without running anything of it.

    Args:
        blob: a pickled PyG `Data`, or a pickled dict, of tensors, NumPy arrays, numbers and strings.
        where: what to call the record in an error, e.g. `record 3 of data.lmdb`.

    Returns:
        Field name to value: tensors on the CPU, NumPy arrays, numbers, strings, lists, dicts. Fields that
        are None are left out.

    Raises:
        InputError: naming what the record may not hold, or where it is damaged.
    """
    with _reported(where):
        resolver = _Resolver()
        fields = {name: resolver.resolve(node) for name, node in _field_nodes(blob).items()}
        return {name: value for name, value in fields.items() if value is not None}


def peek_record(blob: bytes, where: str = "record") -> tuple[dict[str, tuple[int, ...]], Any]:
    """The shape of each field of a record, and its `sid`, without decoding the tensors.

    Args:
        blob: as for `load_record`.
        where: what to call the record in an error.

    Returns:
        Field name to shape, `()` for single values, and the value of `sid` (None where there is none).

    Raises:
        InputError: as `load_record`, except that damage within a tensor's numbers goes unnoticed.
    """
    with _reported(where):
        nodes = _field_nodes(blob)
        shapes = {name: _shape(node) for name, node in nodes.items() if node is not None}
        return shapes, _Resolver().resolve(nodes.get("sid"))


@contextmanager
def _reported(where: str) -> Iterator[None]:
    try:
        yield
    except RefusedName as error:
        raise InputError(
            f"{where} names {error}, which a data record may not; nothing of it was run. Rewrite the record "
            "with tensors, arrays and numbers only"
        ) from None
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{where} cannot be unpickled: {reason}; take the file from its source again"
        ) from None


class _Resolver:
    """Turns a tree of inert `Call`s into values; each shared part is resolved once."""

    def __init__(self) -> None:
        self.resolved: dict[int, Any] = {}

    def resolve(self, node: Any) -> Any:
        if node is None or isinstance(node, (bool, int, float, str, bytes)):
            return node
        if id(node) not in self.resolved:
            self.resolved[id(node)] = None  # a reference back to what is being resolved reads as None
            self.resolved[id(node)] = self._resolve(node)
        return self.resolved[id(node)]

    def _resolve(self, node: Any) -> Any:
        if isinstance(node, Call):
            if node.function not in _MEANINGS:
                raise PickleError(f"a {node.function.name} where a field's value should be")
            return _MEANINGS[node.function](self, node)
        if isinstance(node, dict):
            return {key: self.resolve(value) for key, value in node.items()}
        if isinstance(node, (list, tuple)) and not isinstance(node, (Global, PersistentId)):
            return type(node)(self.resolve(value) for value in node)
        raise PickleError(f"a {type(node).__name__} has no place in it")


def _field_nodes(blob: bytes) -> dict[str, Any]:
    """A record's fields, still as nodes of the pickle's tree."""
    tree, _ = read_pickle(blob, ALLOWED_NAMES)
    if isinstance(tree, Call) and tree.function == _DATA:
        state = _mapping(tree.state)
        store = state.get("_store")
        if isinstance(store, Call):  # PyG 2.x
            nodes = _mapping(_mapping(store.state).get("_mapping"))
        else:  # PyG 1.x
            nodes = {name: node for name, node in state.items() if not str(name).startswith("_")}
    elif isinstance(tree, dict):
        nodes = tree
    else:
        raise PickleError(f"it holds a {type(tree).__name__} and not the fields of a structure")
    if not all(isinstance(name, str) for name in nodes):
        raise PickleError("its fields have no names")
    return nodes


def _shape(node: Any) -> tuple[int, ...]:
    shape = np.shape(node) if isinstance(node, list) else ()
    if isinstance(node, Call):
        match node.function:
            case ("torch._utils", "_rebuild_tensor_v2") | (_, "_frombuffer"):
                shape = tuple(node.args[2])
            case (_, "_reconstruct"):
                shape = tuple(node.state[1])
    _count(shape)
    return shape


def _ordered_dict(resolver: _Resolver, call: Call) -> Any:
    items = _mapping(call.state) if call.state is not None else {}
    if call.args:
        raise PickleError("an OrderedDict of unknown layout")
    return OrderedDict((key, resolver.resolve(value)) for key, value in items.items())


def _storage(resolver: _Resolver, call: Call) -> Tensor:
    (stream,) = (resolver.resolve(arg) for arg in call.args)
    if not isinstance(stream, bytes):
        raise PickleError("its tensor storage is not made of bytes")
    return read_storage(stream)


def _tensor(resolver: _Resolver, call: Call) -> Tensor:
    storage, offset, size, stride, *_ = call.args
    flat = resolver.resolve(storage)
    numbers = (offset, *size, *stride)
    if not isinstance(flat, Tensor) or not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise PickleError("a tensor of unknown layout")
    count = _count(size)
    if count > max(flat.numel(), _MAX_EXPANDED):
        raise PickleError(f"a tensor of {count} elements in a storage of {flat.numel()}")
    if len(size) != len(stride) or (
        count and offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) >= flat.numel()
    ):
        raise PickleError("a tensor reaches beyond its storage")
    if count == 0:
        return flat.new_empty(size)
    # A copy: the storage may be larger than the tensor, or another tensor's as well.
    return torch.as_strided(flat, size, stride, offset).clone(memory_format=torch.contiguous_format)


def _numpy_dtype(resolver: _Resolver, call: Call) -> np.dtype:
    code = call.args[0]
    if not (isinstance(code, str) and code[:1] in "biufSU" and code[1:].isdecimal() and len(code) < 8):
        raise PickleError(f"an array of dtype {code!r}, where numbers and strings are read")
    byte_order = call.state[1] if isinstance(call.state, tuple) and len(call.state) > 1 else "="
    return np.dtype(code).newbyteorder(byte_order if byte_order in "<>=" else "=")


def _numpy_array(resolver: _Resolver, call: Call) -> np.ndarray:
    _, shape, dtype, is_fortran, raw = call.state
    return _array(resolver.resolve(raw), resolver.resolve(dtype), shape, "F" if is_fortran else "C")


def _numpy_from_buffer(resolver: _Resolver, call: Call) -> np.ndarray:
    raw, dtype, shape, order = call.args
    return _array(resolver.resolve(raw), resolver.resolve(dtype), shape, order)


def _numpy_scalar(resolver: _Resolver, call: Call) -> Any:
    dtype, raw = call.args
    return _array(resolver.resolve(raw), resolver.resolve(dtype), (), "C")[()]


def _array(raw: Any, dtype: Any, shape: Any, order: Any) -> np.ndarray:
    if not isinstance(raw, bytes) or not isinstance(dtype, np.dtype) or order not in ("C", "F"):
        raise PickleError("an array of unknown layout")
    if _count(shape) * dtype.itemsize != len(raw) or dtype.itemsize == 0:
        raise PickleError("an array whose shape does not match its bytes")
    array = np.ndarray(shape, dtype, bytearray(raw), order=order)
    return array.view(np.uint8) != 0 if dtype.kind == "b" else array


def _latin1(resolver: _Resolver, call: Call) -> bytes:
    text, encoding = call.args
    if encoding != "latin1":
        raise PickleError(f"bytes encoded as {encoding!r}")
    return text.encode("latin1")


def _no_bytes(resolver: _Resolver, call: Call) -> bytes:
    """Protocol 2 writes empty bytes as `bytes()`."""
    if call.args:
        raise PickleError("bytes made from something else")
    return b""


def _count(shape: Any) -> int:
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise PickleError("a shape of unknown layout")
    return math.prod(shape)


def _mapping(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise PickleError("a Data object of unknown layout")
    return value


_MEANINGS: dict[tuple[str, str], Callable[[_Resolver, Call], Any]] = {
    _REBUILD_TENSOR: _tensor,
    _LOAD_STORAGE: _storage,
    ("collections", "OrderedDict"): _ordered_dict,
    ("numpy", "dtype"): _numpy_dtype,
    ("_codecs", "encode"): _latin1,
    ("__builtin__", "bytes"): _no_bytes,
} | {
    (f"numpy.{core}.{module}", name): meaning
    for core in ("core", "_core")
    for module, name, meaning in (
        ("multiarray", "_reconstruct", _numpy_array),
        ("multiarray", "scalar", _numpy_scalar),
        ("numeric", "_frombuffer", _numpy_from_buffer),
    )
}
ALLOWED_NAMES = frozenset(_MEANINGS) | _PYG_NAMES | {("numpy", "ndarray")}
"""Every (module, name) a data record may refer to."""
