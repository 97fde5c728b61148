"""Reads the pages of an LMDB file with every offset checked, so that no damaged file can crash the process.

The `lmdb` package maps the file and trusts it: a truncated or altered file can end the interpreter with
SIGBUS or SIGSEGV instead of an exception. Reading needs little of LMDB: two meta pages and one B+ tree. This
module walks that tree with positional reads, which also makes a reader safe to share with forked workers,
usable on read-only media, and free of LMDB's lock file, map size and one-environment-per-process rule.
Writing stays with the `lmdb` package.

Layout (LMDB 0.9, data version 1, little-endian, 64-bit; `mdb.c` of OpenLDAP):
page: pgno u64, pad u16, flags u16, then lower u16 and upper u16, or for an overflow page its page count u32;
meta: magic u32, version u32, address u64, map size u64, two tree headers, last page u64, transaction u64;
tree header: pad u32 (page size, in the first), flags u16, depth u16, branch, leaf and overflow page counts
u64, entries u64, root u64; node: lo u16, hi u16, flags u16, key size u16, key, then data or an overflow page.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Iterator
from typing import NamedTuple

_MAGIC = 0xBEEFC0DE
_VERSION = 1
_HEADER = 16
_META = struct.Struct("<II16x")  # and the two trees, the last page and the transaction
_TREE = struct.Struct("<IHH5Q")
_PAGE = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
_BRANCH, _LEAF, _OVERFLOW, _IS_META = 0x01, 0x02, 0x04, 0x08
_BIG = 0x01
_TREES = _HEADER + _META.size
_META_SIZE = _TREES + 2 * _TREE.size + 16
_NO_PAGE = 2**64 - 1
_MAX_DEPTH = 32
_PAGE_SIZES = frozenset(2**n for n in range(8, 17))


class PageError(ValueError):
    """The file is no LMDB, is cut short or is damaged; the message says which."""


class _Meta(NamedTuple):
    page_size: int
    entries: int
    root: int
    flags: int
    last_page: int
    transaction: int


class PageFile:
    """One LMDB file, open for reading until it is collected or `close` is called.

    Raises:
        OSError: the file cannot be opened or read.
        PageError: it is no LMDB file, is cut short, or is damaged where it is read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._finalizer = weakref.finalize(self, os.close, self._file)
        self.size = os.fstat(self._file).st_size
        meta = self._newest_meta()
        self.page_size, self.entries, self._root = meta.page_size, meta.entries, meta.root
        self.transaction = meta.transaction
        if self.size < (needed := (meta.last_page + 1) * meta.page_size):
            self._check_extent(needed)

    def close(self) -> None:
        """Close the file; reading after this is an OSError."""
        self._finalizer()
        self._file = -1

    def get(self, key: bytes) -> bytes | None:
        """The value under `key`, or None."""
        page_number = self._root
        if page_number == _NO_PAGE:
            return None
        for _ in range(_MAX_DEPTH):
            page, flags, count = self._page(page_number)
            low, high = (1 if flags & _BRANCH else 0), count
            while low < high:  # first node whose key is above the wanted one; a branch's node 0 has no key
                middle = (low + high) // 2
                if self._key(page, middle) <= key:
                    low = middle + 1
                else:
                    high = middle
            if flags & _LEAF:
                return self._value(page, low - 1) if low and self._key(page, low - 1) == key else None
            page_number = self._child(page, low - 1)
        raise PageError("damaged: its tree is deeper than LMDB allows")

    def first_key(self) -> bytes | None:
        """The lowest key, or None for an empty file."""
        return self._end_key(0)

    def last_key(self) -> bytes | None:
        """The highest key, or None for an empty file."""
        return self._end_key(-1)

    def __iter__(self) -> Iterator[bytes]:
        """All keys in byte order."""
        for page, index in self._leaves():
            yield self._key(page, index)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """All keys in byte order with their values."""
        for page, index in self._leaves():
            yield self._key(page, index), self._value(page, index)

    def read_page(self, number: int) -> bytes:
        """The bytes of page `number`, whatever it is; fewer at the end of the file."""
        return self._read(number * self.page_size, self.page_size, exact=False)

    def _newest_meta(self) -> _Meta:
        if self.size == 0:
            raise PageError("empty (0 bytes)")
        first = self._meta(0)
        meta = max(first, self._meta(first.page_size), key=lambda meta: meta.transaction)
        if meta.flags:
            raise PageError(
                f"an LMDB with sorted duplicates or integer keys (flags {meta.flags:#x}), not OC20's"
            )
        return meta

    def _meta(self, offset: int) -> _Meta:
        """The meta page at `offset`. LMDB writes the two in turn; without one, the newest may be lost."""
        raw = self._read(offset, _META_SIZE, exact=False)
        magic, version = _META.unpack_from(raw, _HEADER) if len(raw) >= _HEADER + _META.size else (0, 0)
        if offset == 0 and magic != _MAGIC:
            raise PageError("no LMDB file (its first bytes are not LMDB's)")
        if len(raw) < _META_SIZE:
            raise PageError(f"cut short: it ends at byte {self.size:,}, within its header pages")
        if magic != _MAGIC:
            raise PageError("damaged: one of its two header pages is not one")
        if version != _VERSION:
            raise PageError(f"an LMDB of data version {version}, where version {_VERSION} is read")
        page_size, *_ = _TREE.unpack_from(raw, _TREES)
        _, flags, _, _, _, _, entries, root = _TREE.unpack_from(raw, _TREES + _TREE.size)
        last_page, transaction = struct.unpack_from("<QQ", raw, _TREES + 2 * _TREE.size)
        if page_size not in _PAGE_SIZES or (offset and page_size != offset):
            raise PageError(f"damaged: its page size of {page_size} is not one")
        return _Meta(page_size, entries, root, flags, last_page, transaction)

    def _read(self, offset: int, count: int, exact: bool = True) -> bytes:
        if hasattr(os, "pread"):
            raw = os.pread(self._file, count, offset)
        else:  # Windows, where nothing forks and each worker has a file of its own
            os.lseek(self._file, offset, os.SEEK_SET)
            raw = os.read(self._file, count)
        if exact and len(raw) != count:
            raise PageError(f"cut short at byte {offset + len(raw):,}")
        return raw

    def _page(self, number: int) -> tuple[bytes, int, int]:
        """A branch or leaf page, its kind and its number of nodes."""
        if not 1 < number < self.size // self.page_size:
            raise PageError(f"damaged: it refers to page {number}, which it does not have")
        page = self._read(number * self.page_size, self.page_size)
        own_number, _, flags, lower, upper = _PAGE.unpack_from(page)
        kind = flags & (_BRANCH | _LEAF | _OVERFLOW | _IS_META)
        if (
            own_number != number
            or kind not in (_BRANCH, _LEAF)
            or not _HEADER <= lower <= upper <= self.page_size
        ):
            raise PageError(f"damaged: page {number} is not a page of its tree")
        count = (lower - _HEADER) // 2
        if count == 0:
            raise PageError(f"damaged: page {number} is empty")
        return page, kind, count

    def _node(self, page: bytes, index: int) -> tuple[int, int, int, int, int]:
        """Offset of the node's key, key size, and the node's lo, hi and flags."""
        (offset,) = struct.unpack_from("<H", page, _HEADER + 2 * index)
        if not _HEADER <= offset <= len(page) - _NODE.size:
            raise PageError("damaged: an entry lies outside its page")
        lo, hi, flags, key_size = _NODE.unpack_from(page, offset)
        if offset + _NODE.size + key_size > len(page):
            raise PageError("damaged: a key reaches beyond its page")
        return offset + _NODE.size, key_size, lo, hi, flags

    def _key(self, page: bytes, index: int) -> bytes:
        at, size, *_ = self._node(page, index)
        return page[at : at + size]

    def _child(self, page: bytes, index: int) -> int:
        _, _, lo, hi, flags = self._node(page, index)
        return lo | hi << 16 | flags << 32

    def _value(self, page: bytes, index: int) -> bytes:
        at, key_size, lo, hi, flags = self._node(page, index)
        at, size = at + key_size, lo | hi << 16
        if flags == 0:
            if at + size > len(page):
                raise PageError("damaged: a value reaches beyond its page")
            return page[at : at + size]
        if flags != _BIG:
            raise PageError("an LMDB with sub-databases, not OC20's")
        if at + 8 > len(page):
            raise PageError("damaged: an entry lies outside its page")
        (number,) = struct.unpack_from("<Q", page, at)
        start = number * self.page_size
        if number < 2 or start + _HEADER + size > self.size:
            raise PageError("damaged: a value reaches beyond the file")
        raw = self._read(start, _HEADER + size)
        own_number, _, kind, *_ = _PAGE.unpack_from(raw)
        if own_number != number or not kind & _OVERFLOW:
            raise PageError(f"damaged: page {number} is not the value that it should be")
        return raw[_HEADER:]

    def _check_extent(self, needed: int) -> None:
        """A file may lack free pages at its end, never one that an entry lies on."""
        try:
            for _ in self.items():
                pass
        except PageError:
            raise PageError(f"cut short: it has {self.size:,} of {needed:,} bytes") from None

    def _end_key(self, end: int) -> bytes | None:
        number = self._root
        if number == _NO_PAGE:
            return None
        for _ in range(_MAX_DEPTH):
            page, kind, count = self._page(number)
            if kind == _LEAF:
                return self._key(page, end % count)
            number = self._child(page, end % count)
        raise PageError("damaged: its tree is deeper than LMDB allows")

    def _leaves(self) -> Iterator[tuple[bytes, int]]:
        if self._root == _NO_PAGE:
            return
        seen = 0
        pending = [(self._root, 0)]
        while pending:
            number, depth = pending.pop()
            seen += 1
            if depth > _MAX_DEPTH or seen > self.size // self.page_size:
                raise PageError("damaged: its tree leads back into itself")
            page, kind, count = self._page(number)
            if kind == _LEAF:
                yield from ((page, index) for index in range(count))
            else:
                pending.extend((self._child(page, index), depth + 1) for index in reversed(range(count)))
