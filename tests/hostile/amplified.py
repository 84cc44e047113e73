"""Small files that ask for much: values that many entries share, members repeated by the thousand.

A reader that walks a shared value again for each use, or a text once for each of its members, takes minutes here,
and one that keeps what it puts together for each takes gigabytes. Each case is made from a random generator.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from hostile.archives import tensor, text
from hostile.mutated import Pairs, Raw, dumped, parsed

# --- pickles ---

SIZES = ((300_000, 1_500), (10_000, 10_000), (1_000, 100_000))
"""Parts of a shared value, and its uses."""

_PARAMETER = b"ctorch._utils\n_rebuild_parameter\n"
_TYPED = b"ctorch._tensor\n_rebuild_from_type_v2\n"
_REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"


def _table(last: bytes) -> Callable[[int], bytes]:
    """A dict of so many entries, the last of which is a tensor or is not."""
    return lambda n: b"}(" + b"".join(text(f"{i}") + b"N" for i in range(n)) + text("z") + last + b"u"


SHARED: dict[str, Callable[[int], bytes]] = {
    "a dict": _table(b"N"),
    "a dict with a tensor": _table(tensor()),
    "a list": lambda n: b"](" + b"N" * n + b"e",
    "numbers": lambda n: b"(" + b"K\x01" * n + b"t",
    "nothings": lambda n: b"(" + b"N" * n + b"t",
    "a view and nothings": lambda n: (
        b"(" + tensor().removeprefix(_REBUILD + b"(").removesuffix(b"tR") + b"N" * n + b"t"
    ),
    "a chain of parameters": lambda n: _PARAMETER * n + tensor() + b"\x85R" * n,
    "a chain of subclasses": lambda n: (
        _TYPED * 2 + b"N" + (_TYPED + b"N") * n + b")" + b"\x87" * n + b"\x87R"
    ),
    "a tensor": lambda n: tensor(),
    "a text": lambda n: text("a" * n),
    "a wide text": lambda n: text("\U0001f600" + "a" * n),
    "a word of wide letters": lambda n: text("\U0001f600" + "a" * 480),
    "a number": lambda n: b"\x8b" + n.to_bytes(4, "little") + b"\x7f" * n,
}
"""Instructions that put a value of so many parts on the stack."""

_GET = b"j\x00\x00\x00\x00"

USES: dict[str, Callable[[int], bytes]] = {
    "an entry": lambda i: text(f"w{i}") + _GET,
    "a name": lambda i: _GET + tensor(),
    "a shape": lambda i: text(f"w{i}") + tensor(_GET, _GET),
    "strides": lambda i: text(f"w{i}") + tensor(strides=_GET),
    "a size": lambda i: text(f"w{i}") + tensor(items=_GET),
    "a key of a storage": lambda i: text(f"w{i}") + tensor(key=_GET),
    "a storage": lambda i: text(f"w{i}") + _REBUILD + b"(" + _GET + b"QK\x00K\x04\x85K\x01\x85\x89NtR",
    "arguments": lambda i: text(f"w{i}") + _REBUILD + _GET + b"R",
    "a parameter": lambda i: text(f"w{i}") + _PARAMETER + _GET + b"\x85R",
    "arguments of a dict": lambda i: text(f"w{i}") + b"ccollections\nOrderedDict\n" + _GET + b"R",
    "attributes of a dict": lambda i: text(f"w{i}") + b"}" + _GET + b"b",
    "a module and a class": lambda i: text(f"w{i}") + _GET + _GET + b"\x93",
    "a class": lambda i: text(f"w{i}") + text("torch") + _GET + b"\x93",
    "a function": lambda i: text(f"w{i}") + _GET + b")R",
    "nothing, at a place with a hash like others'": lambda i: (
        text(f"w{i}") + b"Np%d\n" % ((i + 1) * ((1 << 61) - 1))
    ),
}
"""Instructions that put one entry on the stack, a name and what it names, made with the shared value."""


def pickled(shared: str, use: str, parts: int, times: int) -> bytes:
    """A pickle of a dict with so many entries that use one value."""
    made = SHARED[shared](parts) + b"r\x00\x00\x00\x00"
    return b"\x80\x04" + made + b"}(" + b"".join(map(USES[use], range(times))) + b"u."


def a_pickle(rng: Random) -> bytes:
    return pickled(rng.choice(list(SHARED)), rng.choice(list(USES)), *rng.choice(SIZES))


# --- JSON ---

MEMBERS = (1_000, 5_000, 20_000)


def json_text(rng: Random, data: bytes, names: Sequence[str] = ()) -> bytes:
    """A JSON text with one or two of its arrays and objects many times as long.

    An object has copies of a member, under its name, one of `names`, or numbered ones.
    """
    tree = parsed(data)
    for _ in range(rng.choice((1, 1, 2))):
        found: list[list[Any]] = []
        _containers(tree, found)
        _lengthen(rng, rng.choice(found), rng.choice(MEMBERS), names)
    return dumped(tree)


def _containers(node: Any, found: list[list[Any]]) -> None:
    if isinstance(node, list):
        found.append(node)
        for value in (pair[1] for pair in node) if isinstance(node, Pairs) else node:
            _containers(value, found)


def _lengthen(rng: Random, node: list[Any], times: int, names: Sequence[str]) -> None:
    key, value = rng.choice(node) if isinstance(node, Pairs) and node else ("x", rng.choice(node or [1]))
    written = Raw(dumped(value).decode())  # a value may be as long as the rest
    if len(written.text) > 1_000:
        return
    act, word = rng.random(), rng.choice((*names, key, key, key))
    for i in range(times):
        if not isinstance(node, Pairs):
            node.append(f"{word}{i}" if isinstance(value, str) and act < 0.5 else written)
        else:
            node.append([word if act < 0.4 else f"{i}.{word}" if act < 0.6 else f"{word}{i}", written])


def tensors(rng: Random, data: bytes, names: Sequence[str] = ()) -> bytes:
    """A safetensors file with thousands of tensors more, without elements, under names like one that it has."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    end, word = len(data) - start, rng.choice((*header, *names))
    front, dot, last = word.rpartition(".")
    dtype = rng.choice(("F32", "BF16", "U8", "F8_E4M3"))
    for i in range(rng.choice(MEMBERS)):
        name = f"{word}{i}" if rng.random() < 0.1 else f"{front}{i}{dot}{last}"
        header[name] = {"dtype": dtype, "shape": [0], "data_offsets": [end, end]}
    made = json.dumps(header).encode()
    return len(made).to_bytes(8, "little") + made + data[start:]
