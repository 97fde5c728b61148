"""Reads the torch stream in which a pickled tensor keeps its numbers.

Source: the file format that `torch.save` wrote before zip files and that pickled tensors still use: a magic
number, a protocol number and a description of the system, each a pickle; a pickle that refers to one storage
by type, key, device and size; the list of keys; then for each key its number of elements and the raw
elements. All pickles go through `pickle_machine`, so a stream can hold weights and nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from molflt.data.pickle_machine import Global, PersistentId, PickleError, read_pickle

STORAGE_DTYPES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""torch's storage classes, as storage streams name them."""

HEAD = (
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."
    b"\x80\x02}q\x00(X\x10\x00\x00\x00protocol_versionq\x01M\xe9\x03X\r\x00\x00\x00little_endianq\x02\x88"
    b"X\n\x00\x00\x00type_sizesq\x03}q\x04(X\x05\x00\x00\x00shortq\x05K\x02X\x03\x00\x00\x00intq\x06K\x04"
    b"X\x04\x00\x00\x00longq\x07K\x04uu."
)
"""Magic number, protocol and system as Python 3.6 and later pickle them on a little-endian machine."""

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_STREAM_NAMES = frozenset(("torch", name) for name in STORAGE_DTYPES)


def read_storage(stream: bytes) -> Tensor:
    """Decode a torch stream of one storage into a flat CPU tensor.

    Raises:
        PickleError: the stream holds something else, is big-endian or is cut short.
    """
    at = len(HEAD) if stream.startswith(HEAD) else _read_head(stream)
    reference, at = read_pickle(stream, _STREAM_NAMES, at)
    keys, at = read_pickle(stream, (), at)
    match reference:
        case PersistentId(("storage", Global("torch", storage_name), str(key), _, int(count), None)):
            pass
        case _:
            raise PickleError("its tensor storage names no storage")
    dtype = STORAGE_DTYPES[storage_name]
    body = memoryview(stream)[at + 8 :]
    size = count * dtype.itemsize
    if keys != [key] or int.from_bytes(stream[at : at + 8], "little") != count or len(body) != size:
        raise PickleError("its tensor storage is cut short or longer than it says")
    if count == 0:
        return torch.empty(0, dtype=dtype)
    if dtype == torch.bool:
        return torch.frombuffer(bytearray(body), dtype=torch.uint8) != 0
    return torch.frombuffer(bytearray(body), dtype=dtype)


def _read_head(stream: bytes) -> int:
    """Where the head of a stream that was pickled another way ends."""
    magic, at = read_pickle(stream, ())
    protocol, at = read_pickle(stream, (), at)
    system, at = read_pickle(stream, (), at)
    if (magic, protocol) != (_MAGIC, _PROTOCOL):
        raise PickleError("its tensor storage is no torch stream")
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise PickleError("its tensor storage is not little-endian")
    return at
