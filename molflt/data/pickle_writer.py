"""Writes data records as the pickles that OC20's tools expect, the same bytes every time.

`pickle.dumps` of a tensor holds the storage's memory address, so the same data never gives the same file
twice. Here the instructions are written out one by one: `Data` in PyG 1.x's layout, as in OC20's own
LMDBs, or in PyG 2.x's, and each tensor's storage as a torch stream under the key `0`. `pickle.loads` with
PyG reads both (PyG 1.x's layout only through tools that know it, as for OC20's files).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from molflt.data.torch_stream import HEAD, STORAGE_DTYPES

Layout = Literal["pyg1", "pyg2"]

_STORAGE_NAMES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}
_PYG1_LEADING_FIELDS = ("x", "edge_index", "edge_attr", "y", "pos", "normal", "face")
_DATA, _REBUILD, _LOAD, _ORDERED_DICT = range(4)  # places in the pickle's memo
_STOP = b"."


def dump_record(fields: Mapping[str, Any], layout: Layout = "pyg2") -> bytes:
    """Pickle one record.

    Args:
        fields: field name to CPU tensor, number, string or None, in the order to write.
        layout: `pyg2` for a `Data` that PyG 2 unpickles and uses; `pyg1` for the flat state of PyG 1.x, with
            that class's own fields first and None where absent.

    Returns:
        The pickle, protocol 4.

    Raises:
        TypeError: naming a field whose value has no place in a record.
    """
    body = bytearray(b"\x80\x04")
    body += _global("torch_geometric.data.data", "Data") + b")\x81" + _put(_DATA)
    memo: set[int] = set()
    if layout == "pyg1":
        full = dict.fromkeys(_PYG1_LEADING_FIELDS) | dict(fields)
        body += _dict({name: _value(name, value, memo) for name, value in full.items()})
    else:
        mapping = _dict(
            {name: _value(name, value, memo) for name, value in fields.items() if value is not None}
        )
        store = _global("torch_geometric.data.storage", "GlobalStorage") + b")\x81"
        store += _dict({"_mapping": mapping, "_parent": _get(_DATA)}) + b"b"
        body += _dict(
            {
                "_edge_attr_cls": _global("torch_geometric.data.data", "DataEdgeAttr"),
                "_tensor_attr_cls": _global("torch_geometric.data.data", "DataTensorAttr"),
                "_store": store,
            }
        )
    return bytes(body + b"b" + _STOP)


def dump_int(number: int) -> bytes:
    """Pickle one integer, as the `length` entry of an LMDB holds it."""
    return b"\x80\x04" + _int(number) + _STOP


def _value(name: str, value: Any, memo: set[int]) -> bytes:
    match value:
        case Tensor() if value.dtype in _STORAGE_NAMES and value.layout == torch.strided:
            return _tensor(value.detach().cpu().contiguous(), memo)
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            return _int(value)
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            return _text(value)
    raise TypeError(
        f"field {name!r} holds a {type(value).__name__}; a record takes tensors, numbers, strings and None"
    )


def _tensor(tensor: Tensor, memo: set[int]) -> bytes:
    size = b"(" + b"".join(map(_int, tensor.shape)) + b"t"
    stride = b"(" + b"".join(map(_int, tensor.stride())) + b"t"
    storage = _once(_LOAD, memo, lambda: _global("torch.storage", "_load_from_bytes"))
    storage += _bytes(_storage_stream(tensor)) + b"\x85R"
    hooks = _once(_ORDERED_DICT, memo, lambda: _global("collections", "OrderedDict")) + b")R"
    rebuild = _once(_REBUILD, memo, lambda: _global("torch._utils", "_rebuild_tensor_v2"))
    return rebuild + b"(" + storage + _int(0) + size + stride + b"\x89" + hooks + b"tR"


def _storage_stream(tensor: Tensor) -> bytes:
    """The stream as torch writes it, except that its key is `0` and not a memory address."""
    key = b"X\x01\x00\x00\x000"
    reference = (
        b"\x80\x02(X\x07\x00\x00\x00storageq\x00ctorch\n" + _STORAGE_NAMES[tensor.dtype].encode() + b"\nq\x01"
    )
    reference += key + b"q\x02X\x03\x00\x00\x00cpuq\x03" + _int(tensor.numel()) + b"Ntq\x04Q."
    keys = b"\x80\x02]q\x00" + key + b"q\x01a."
    numbers = tensor.flatten().view(torch.uint8).numpy().tobytes()
    return HEAD + reference + keys + struct.pack("<q", tensor.numel()) + numbers


def _dict(items: Mapping[str, bytes]) -> bytes:
    return b"}(" + b"".join(_text(name) + value for name, value in items.items()) + b"u"


def _text(text: str) -> bytes:
    raw = text.encode()
    return b"\x8c" + bytes([len(raw)]) + raw if len(raw) < 256 else b"X" + struct.pack("<I", len(raw)) + raw


def _bytes(raw: bytes) -> bytes:
    return b"B" + struct.pack("<I", len(raw)) + raw


def _int(number: int) -> bytes:
    if 0 <= number < 256:
        return b"K" + bytes([number])
    if 0 <= number < 65536:
        return b"M" + struct.pack("<H", number)
    if -(2**31) <= number < 2**31:
        return b"J" + struct.pack("<i", number)
    raw = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def _global(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"


def _put(index: int) -> bytes:
    return b"q" + bytes([index])


def _get(index: int) -> bytes:
    return b"h" + bytes([index])


def _once(index: int, memo: set[int], write: Callable[[], bytes]) -> bytes:
    """A global by its name the first time and from the memo after."""
    if index in memo:
        return _get(index)
    memo.add(index)
    return write() + _put(index)
