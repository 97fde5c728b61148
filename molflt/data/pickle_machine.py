"""Reads a pickle as a description of itself: nothing named in it is imported, built or called.

A pickle is a small program whose `GLOBAL`, `REDUCE`, `NEWOBJ` and `BUILD` instructions import names and call
them. This machine knows the instructions of protocols 2 to 5 that data needs and answers those four with
inert records, `Global` and `Call`; whoever reads the tree decides what each means. Names are checked against
an allow-list as soon as they appear. Every length is checked against the bytes at hand, so a damaged pickle
ends in `PickleError` and neither in a crash nor in a huge allocation (CPython's own unpickler allocates
what a memo index or a bytearray length in the file asks for).

Source: the opcode table of CPython's `pickletools`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from typing import Any, NamedTuple


class PickleError(ValueError):
    """The bytes are no pickle that the machine reads."""


class RefusedName(PickleError):
    """The pickle names something outside the allow-list; the message is that name."""


class Global(NamedTuple):
    """A name the pickle refers to, not imported."""

    module: str
    name: str


class Call:
    """What a pickle asks to be built: `function(*args)`, then given `state`. Never carried out here."""

    __slots__ = ("args", "function", "state")

    def __init__(self, function: Global, args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args
        self.state: Any = None


class PersistentId(NamedTuple):
    """A reference that the pickle leaves to its reader, as torch's storage streams do."""

    value: Any


def read_pickle(
    blob: bytes | memoryview, allowed: Collection[tuple[str, str]], start: int = 0
) -> tuple[Any, int]:
    """Read one pickle of `blob` from `start`.

    Args:
        blob: the bytes.
        allowed: the (module, name) pairs that may be named.
        start: where the pickle begins.

    Returns:
        The tree (numbers, strings, bytes, containers, `Global`, `Call`, `PersistentId`) and the position
        after the pickle.

    Raises:
        RefusedName: the pickle names something else.
        PickleError: the bytes are damaged or use an instruction outside protocols 2 to 5's data part.
    """
    machine = _Machine(memoryview(blob), allowed, start)
    try:
        return machine.run(), machine.at
    except PickleError:
        raise
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, struct.error) as error:
        raise PickleError(f"damaged at byte {machine.at} ({type(error).__name__})") from None


class _Machine:
    def __init__(self, view: memoryview, allowed: Collection[tuple[str, str]], start: int) -> None:
        self.view = view
        self.allowed = allowed
        self.at = start
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        view, handlers = self.view, _HANDLERS
        while True:
            opcode = view[self.at]
            self.at += 1
            if opcode == _STOP:
                return self.stack.pop()
            handler = handlers.get(opcode)
            if handler is None:
                raise PickleError(
                    f"instruction {opcode:#04x} at byte {self.at - 1} is not one that data uses"
                )
            handler(self)

    def take(self, count: int) -> memoryview:
        end = self.at + count
        if count < 0 or end > len(self.view):
            raise PickleError(f"cut short at byte {self.at}")
        taken = self.view[self.at : end]
        self.at = end
        return taken

    def number(self, layout: struct.Struct) -> Any:
        return layout.unpack(self.take(layout.size))[0]

    def pop_to_mark(self) -> list[Any]:
        mark = self.marks.pop()
        if mark > len(self.stack):
            raise PickleError(f"damaged at byte {self.at} (mark)")
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def line(self) -> str:
        ahead = bytes(self.view[self.at : self.at + 512])
        text = ahead[: ahead.index(b"\n")]
        self.at += len(text) + 1
        return text.decode()

    def name(self, module: Any, name: Any) -> Global:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise PickleError(f"damaged at byte {self.at} (name)")
        if (module, name) not in self.allowed:
            raise RefusedName(_printable(f"{module}.{name}"))
        return Global(module, name)

    def call(self, function: Any, args: Any) -> Call:
        if not (isinstance(function, Global) and isinstance(args, tuple)):
            raise PickleError(f"damaged at byte {self.at} (call of what is not a name)")
        return Call(function, args)


def _printable(name: str) -> str:
    """A name for an error message: on one line, without terminal codes, of bounded length."""
    return (name if name.isprintable() else ascii(name))[:200]


_STOP = ord(".")
_U1, _U2, _U4, _U8 = (struct.Struct(f"<{code}") for code in "BHIQ")
_I4 = struct.Struct("<i")
_F8 = struct.Struct(">d")


def _push(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda m: m.stack.append(value(m))


def _bytes(layout: struct.Struct) -> Callable[[_Machine], None]:
    return _push(lambda m: bytes(m.take(m.number(layout))))


def _text(layout: struct.Struct) -> Callable[[_Machine], None]:
    return _push(lambda m: str(m.take(m.number(layout)), "utf-8", "surrogatepass"))


def _long(layout: struct.Struct) -> Callable[[_Machine], None]:
    return _push(lambda m: int.from_bytes(m.take(m.number(layout)), "little", signed=True))


def _tuple(count: int) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        if len(m.stack) < count:
            raise PickleError(f"damaged at byte {m.at} (tuple)")
        m.stack[-count:] = [tuple(m.stack[-count:])]

    return handler


def _put(layout: struct.Struct) -> Callable[[_Machine], None]:
    def handler(m: _Machine) -> None:
        m.memo[m.number(layout)] = m.stack[-1]

    return handler


def _memoize(m: _Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _append(m: _Machine) -> None:
    value = m.stack.pop()
    _as(list, m).append(value)


def _appends(m: _Machine) -> None:
    items = m.pop_to_mark()
    _as(list, m).extend(items)


def _set_item(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _fill(m, [key, value])


def _set_items(m: _Machine) -> None:
    _fill(m, m.pop_to_mark())


def _fill(m: _Machine, items: list[Any]) -> None:
    keys = items[::2]
    if not all(type(key) in (str, int) for key in keys):  # hashing a deep tuple can exhaust the C stack
        raise PickleError(f"damaged at byte {m.at} (key)")
    _as(dict, m).update(zip(keys, items[1::2], strict=True))


def _as(kind: type, m: _Machine) -> Any:
    """The container on top of the stack; a `Call` that builds an OrderedDict takes items as its state."""
    top = m.stack[-1]
    if kind is dict and isinstance(top, Call):
        top.state = {} if top.state is None else top.state
        top = top.state
    if type(top) is not kind:
        raise PickleError(f"damaged at byte {m.at} (no {kind.__name__} to fill)")
    return top


def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.stack.append(m.name(module, name))


def _reduce(m: _Machine) -> None:
    args, function = m.stack.pop(), m.stack.pop()
    m.stack.append(m.call(function, args))


def _build(m: _Machine) -> None:
    state = m.stack.pop()
    top = m.stack[-1]
    if not isinstance(top, Call):
        raise PickleError(f"damaged at byte {m.at} (state for what is not an object)")
    top.state = state


def _two_lines(m: _Machine) -> Global:
    module = m.line()
    return m.name(module, m.line())


_HANDLERS: dict[int, Callable[[_Machine], None]] = {
    ord(code): handler
    for code, handler in {
        "\x80": lambda m: m.take(1),  # PROTO
        "\x95": lambda m: m.take(8),  # FRAME
        "(": lambda m: m.marks.append(len(m.stack)),
        "0": lambda m: m.stack.pop(),
        "1": lambda m: m.pop_to_mark(),
        "N": _push(lambda m: None),
        "\x88": _push(lambda m: True),
        "\x89": _push(lambda m: False),
        "J": _push(lambda m: m.number(_I4)),
        "K": _push(lambda m: m.number(_U1)),
        "M": _push(lambda m: m.number(_U2)),
        "\x8a": _long(_U1),
        "\x8b": _long(_U4),
        "G": _push(lambda m: m.number(_F8)),
        "B": _bytes(_U4),
        "C": _bytes(_U1),
        "\x8e": _bytes(_U8),
        "\x96": _bytes(_U8),  # BYTEARRAY8
        "X": _text(_U4),
        "\x8c": _text(_U1),
        "\x8d": _text(_U8),
        ")": _push(lambda m: ()),
        "\x85": _tuple(1),
        "\x86": _tuple(2),
        "\x87": _tuple(3),
        "t": _push(lambda m: tuple(m.pop_to_mark())),
        "]": _push(lambda m: []),
        "a": _append,
        "e": _appends,
        "}": _push(lambda m: {}),
        "s": _set_item,
        "u": _set_items,
        "q": _put(_U1),
        "r": _put(_U4),
        "\x94": _memoize,
        "h": _push(lambda m: m.memo[m.number(_U1)]),
        "j": _push(lambda m: m.memo[m.number(_U4)]),
        "c": _push(_two_lines),
        "\x93": _stack_global,
        "R": _reduce,
        "\x81": _reduce,  # NEWOBJ: cls.__new__(cls, *args)
        "b": _build,
        "Q": _push(lambda m: PersistentId(m.stack.pop())),
    }.items()
}
