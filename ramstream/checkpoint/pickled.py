"""A pickle as plain data: its opcodes are read, and nothing they ask for is ever imported or called.

A pickle is a program for a machine with a stack (see the standard library's `pickletools`). Weights need few
of its instructions, and only a handful of names, which stay names here.
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from ramstream.checkpoint.wording import listed, shown

_LITERALS = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("STRING", "SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
    )
)


_MOST_STEPS = 4_000_000
"""Instructions of a pickle: some thirty a tensor, and each may take 150 bytes of memory."""
_MOST_PLACES = 1 << 32
_LONGEST_NAME = 1000
"""Of what is imported: put together from parts, names may grow much larger than the pickle."""
_MOST_LETTERS = 20_000_000
"""Of all imported names together; each letter may take 4 bytes, twice."""


class Global(str):
    """The dotted name of what a pickle would import."""

    __slots__ = ()


@dataclass(eq=False, slots=True)
class Call:
    """What a pickle would call, and with what."""

    function: Global
    arguments: tuple[object, ...]


@dataclass(eq=False, slots=True)
class Table:
    """A dict or OrderedDict as it was written; a key may occur twice."""

    pairs: list[tuple[object, object]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Persistent:
    """What lies outside the pickle, by its id."""

    id: object


def read(data: bytes, is_known: Callable[[str], object]) -> object:
    """The value that a pickle describes: None, bool, int, float, str, bytes, tuple, list and the classes above.

    ValueError lists all names it asks for that are not known, or else says why it cannot be read.
    """
    machine = _Machine(is_known)
    fault = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a backslash in a name
            for steps, (opcode, argument, _) in enumerate(pickletools.genops(data)):
                if steps > _MOST_STEPS:
                    raise ValueError(f"it has more than {_MOST_STEPS:,} instructions")
                machine.step(opcode.name, argument)
        value = machine.pop()
    except LookupError:
        fault = "its stack is damaged"
    except ValueError as error:
        fault = str(error)
    if machine.foreign:
        raise ValueError(
            f"its pickle asks for {listed(list(machine.foreign))}, which no weights need, and nothing of it was "
            "run; save the weights alone (`torch.save(model.state_dict(), …)`), or drop a file you do not trust"
        )
    if fault:
        raise ValueError(f"its pickle cannot be read ({shown(fault)}); download it again")
    return value


class _Machine:
    """The pickle machine without its power: what it would import or call is kept as data."""

    def __init__(self, is_known: Callable[[str], object]) -> None:
        self.foreign: dict[str, None] = {}
        """Names that are not known. Once there is one the pickle is refused, and read on only for the others."""
        self._is_known = is_known
        self._stack: list[object] = []
        self._below: list[list[object]] = []
        """The stacks below the marks."""
        self._memo: dict[object, object] = {}
        self._letters = 0
        """Of the names so far."""

    def pop(self) -> object:
        """The value on top."""
        return self._stack.pop()

    def step(self, name: str, argument: object) -> None:
        """One instruction. LookupError where the stack lacks what it takes, ValueError where it is none of ours."""
        match name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "MARK":
                self._below.append(self._stack)
                self._stack = []
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                if not isinstance(argument, int) or argument > _MOST_PLACES:  # larger ones may share one hash
                    raise ValueError("it keeps a value at a place beyond 2^32")
                self._memo[argument] = self._stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = self._stack[-1]
            case "GLOBAL" | "STACK_GLOBAL" | "REDUCE" | "NEWOBJ" | "BINPERSID" | "BUILD":
                self._act(name, argument)
            case "SETITEM" | "SETITEMS" | "APPEND" | "APPENDS":
                self._fill(name)
            case _:
                value = self._value(name, argument)  # first: it may change which stack is ours
                self._stack.append(value)

    def _value(self, name: str, argument: object) -> object:
        """What an instruction pushes that makes or repeats a value."""
        match name:
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                return {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name]
            case "GET" | "BINGET" | "LONG_BINGET":
                return self._memo[argument]
            case "EMPTY_DICT":
                return Table()
            case "EMPTY_LIST":
                return []
            case "EMPTY_TUPLE":
                return ()
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                return tuple([self.pop() for _ in range(int(name[-1]))][::-1])
            case "TUPLE":
                return tuple(self._marked())
            case "LIST":
                return self._marked()
        if name in _LITERALS:
            return argument
        raise ValueError(f"it uses {name}, which no weights need")

    def _act(self, name: str, argument: object) -> None:
        """What would import, call, or look outside."""
        if name == "GLOBAL":
            self._push_name(*str(argument).split(" ", 1))
            return
        given = self.pop()
        if name == "STACK_GLOBAL":
            module = self.pop()
            if not isinstance(module, str) or not isinstance(given, str):
                raise ValueError("it imports something that is no name")
            self._push_name(module, given)
        elif name == "BINPERSID":
            self._stack.append(Persistent(given))
        elif name == "BUILD":  # attributes of an OrderedDict, as `_metadata`
            if not isinstance(self._stack[-1], Table):
                self._fault("it sets attributes of something else than a dict")
        else:
            function = self.pop()
            if function == "collections.OrderedDict" and given == ():
                self._stack.append(Table())
            elif isinstance(function, Global) and isinstance(given, tuple):
                self._stack.append(Call(function, given))
            else:
                self._fault("it calls something that is no name")
                self._stack.append(None)

    def _push_name(self, module: str, attribute: str) -> None:
        if len(module) + len(attribute) > _LONGEST_NAME:
            raise ValueError(f"it imports a name of {len(module) + len(attribute):,} letters")
        name = f"{module}.{attribute}"
        self._letters += len(name)
        if self._letters > _MOST_LETTERS:
            raise ValueError(f"it imports names of more than {_MOST_LETTERS:,} letters")
        if not self._is_known(name):
            self.foreign[name] = None
        self._stack.append(Global(name))

    def _fault(self, fault: str) -> None:
        """A fault, unless the pickle is refused anyway."""
        if not self.foreign:
            raise ValueError(fault)

    def _fill(self, name: str) -> None:
        """Add items to the dict or list below them."""
        is_table = name.startswith("SETITEM")
        items = self._marked() if name.endswith("S") else [self.pop() for _ in range(1 + is_table)][::-1]
        target = self._stack[-1]
        if isinstance(target, Table) and is_table and len(items) % 2 == 0:
            target.pairs += zip(items[::2], items[1::2], strict=True)
        elif isinstance(target, list) and not is_table:
            target += items
        else:
            self._fault("it adds items to something that takes none")

    def _marked(self) -> list[object]:
        items, self._stack = self._stack, self._below.pop()
        return items
