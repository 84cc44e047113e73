"""The tensors of a PyTorch state dict, as its pickle describes them.

A tensor is a call of one of `torch._utils._rebuild_…` with a storage, and an offset, a shape and strides in it,
counted in elements.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ramstream.checkpoint.archive import Member
from ramstream.checkpoint.pickled import Call, Global, Persistent, Table
from ramstream.checkpoint.safetensors import MOST_DIMENSIONS, MOST_LOOKED_AT, name_fault
from ramstream.checkpoint.wording import listed, shown
from ramstream.types import ITEMSIZE, Dtype, Strided, TensorInfo, config_name

ALONE = "save the weights alone (`torch.save(model.state_dict(), …)`)"

_LARGEST = (1 << 63) - 1
_MOST_EXPANDED = 1 << 20
"""How many times the stored elements an expanded tensor may have: a few bytes must not become terabytes."""

_DAMAGED = "the file is damaged, download it again"

_STORAGES = {
    f"{word}Storage": dtype
    for words, dtypes in (
        ("Float Double Half BFloat16", "F32 F64 F16 BF16"),
        ("Long Int Short Char Byte Bool Untyped", "I64 I32 I16 I8 U8 BOOL U8"),
    )
    for word, dtype in zip(words.split(), dtypes.split(), strict=True)
}
_DTYPES = {
    **{config_name(dtype): dtype.name for dtype in Dtype},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bool": "BOOL",
}

_REBUILD = "torch._utils._rebuild_"
_TYPED = "torch._tensor._rebuild_from_type_v2"
_MOST_WRAPPED = 8
"""Parameters and subclasses around a tensor; all entries of a dict may share a chain as long as the file."""
_PARAMETERS = (f"{_REBUILD}parameter", f"{_REBUILD}parameter_with_state")
_NEEDED = {"tensor": 4, "tensor_v2": 6, "tensor_v3": 7}
"""Arguments of the calls that rebuild plain tensors; one more may follow."""

_REFUSED = {
    "qtensor": "is quantised, and quantised integers cannot be averaged; use the unquantised checkpoint",
    "sparse_tensor": "is sparse; save it as `.to_dense()`",
    "sparse_csr_tensor": "is sparse; save it as `.to_dense()`",
    "nested_tensor": "is nested; save its tensors one by one",
    "meta_tensor_no_storage": "is on the meta device and has no data; save it with its data",
}

KNOWN = re.compile(
    r"collections\.OrderedDict|torch\.(?:storage\.)?\w+Storage|torch\.(?:Size|Tensor|device|nn\.parameter\.Parameter)|"
    r"torch\.(?:(?:bfloat|bits|complex|float|u?int|qu?int)\d\w*|bool)|torch\.per_(?:tensor|channel)_affine\w*|"
    rf"torch\.serialization\._get_layout|{re.escape(_REBUILD)}\w+|{re.escape(_TYPED)}"
)
"""Every name that tensors of any kind ask for."""


def tensors_of(
    value: object, storages: Mapping[str, Member], file: str
) -> tuple[list[TensorInfo], list[str]]:
    """The tensors of a state dict by offset, and a line for everything that is wrong with one.

    `storages` says where in the file each lies. ValueError where `value` is no state dict.
    """
    tensors, problems = [], []
    pairs = _pairs(value)
    stored = _Storages(storages)
    for name, entry in pairs:
        if type(name) is not str:
            problems.append(f"{_shown_key(name)}: its name is {_kind(name)}, not text; {ALONE}")
        else:
            try:
                tensors.append(_tensor(name, entry, stored, file))
            except ValueError as error:
                problems.append(f"{shown(name)}: {error}")
        if len(problems) == MOST_LOOKED_AT:
            break
    times = Counter(name for name, _ in pairs if type(name) is str)
    problems += [f"{shown(name)}: occurs {n} times; {_DAMAGED}" for name, n in times.items() if n > 1]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    return tensors, problems


def _pairs(value: object) -> Sequence[tuple[object, object]]:
    """Names and what they name; ValueError where that is not what a file is about."""
    if not isinstance(value, Table):
        what = "a single tensor" if _is_tensor(value) else _kind(value)
        raise ValueError(f"holds {what}, not a dict of tensors; {ALONE}")
    if any(_is_tensor(entry) for _, entry in value.pairs):
        return value.pairs
    inner = {id(entry): entry for _, entry in value.pairs if isinstance(entry, Table)}  # may be one for all
    holding = {key for key, table in inner.items() if any(_is_tensor(entry) for _, entry in table.pairs)}
    nested = [_shown_key(name) for name, entry in value.pairs if id(entry) in holding]
    if nested:
        raise ValueError(
            f"holds dicts of tensors, not tensors: {listed(nested)}; save the one with the weights alone "
            f"(`torch.save(torch.load(…)[{nested[0]!r}], …)`)"
        )
    return value.pairs


def _shown_key(name: object) -> str:
    return shown(name) if isinstance(name, str | int) else "an entry"


def _is_tensor(value: object) -> bool:
    return isinstance(value, Call) and value.function.startswith((_REBUILD, _TYPED))


def _kind(value: object) -> str:
    """What a value of the pickle is, for messages."""
    if isinstance(value, Call):
        return f"a call of {shown(value.function)}"
    names = {Table: "a dict", Persistent: "a bare storage", Global: "a class or function", type(None): "None"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


class _View(NamedTuple):
    """The arguments that rebuild a plain tensor."""

    storage: object
    offset: Any
    shape: Any
    strides: Any
    dtype: Global | None
    """None where the storage has it."""


def _tensor(name: str, value: object, storages: _Storages, file: str) -> TensorInfo:
    """One entry of the state dict; ValueError says what is wrong with it."""
    if name == "__metadata__":
        raise ValueError("is no name that a safetensors file can hold; rename it")
    if fault := name_fault(name):
        raise ValueError(f"{fault}; rename it")
    view = _view(value)
    dtype, at = storages.of(view)
    offset, shape, strides = view.offset, view.shape, view.strides
    fit = type(shape) is type(strides) is tuple and len(shape) == len(strides)
    if fit and len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"has {len(shape):,} dimensions, the limit is {MOST_DIMENSIONS}; {_DAMAGED}")
    if not fit or not all(type(n) is int and 0 <= n <= _LARGEST for n in (offset, *shape, *strides)):
        raise ValueError(f"its offset, shape and strides are no sizes; {_DAMAGED}")
    elements, itemsize = math.prod(shape), ITEMSIZE[dtype]
    if elements * itemsize > _LARGEST:
        raise ValueError(f"shape {shown(shape)} of {dtype} takes more than 2^63 bytes; {_DAMAGED}")
    if not elements:
        return TensorInfo(name, dtype, shape, file, at.offset, 0)
    last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    end = (offset + last + 1) * itemsize
    if end > at.size:
        raise ValueError(f"ends at byte {end:,} of its storage, which has {at.size:,}; {_DAMAGED}")
    if elements > _MOST_EXPANDED * (last + 1):
        raise ValueError(f"is expanded from {last + 1:,} items to {elements:,}; save it contiguous()")
    first = at.offset + offset * itemsize
    return TensorInfo(name, dtype, shape, file, first, elements * itemsize, _recipe(shape, strides))


def _view(value: object) -> _View:
    """The view that a tensor is; ValueError where it is no tensor, or none of plain elements."""
    for _ in range(_MOST_WRAPPED):
        if not isinstance(value, Call) or value.function not in (*_PARAMETERS, _TYPED):
            break
        match value.arguments:
            case (inner, *_) if value.function in _PARAMETERS:
                value = inner
            case (Global() as function, _, tuple() as arguments, *_):
                value = Call(function, arguments)
            case _:
                raise ValueError(f"is rebuilt from nothing; {_DAMAGED}")
    if not isinstance(value, Call) or not _is_tensor(value):
        raise ValueError(f"is {_kind(value)}, not a tensor; {ALONE}")
    kind, arguments = value.function.removeprefix(_REBUILD), value.arguments
    if kind not in _NEEDED:
        raise ValueError(_REFUSED.get(kind, f"is {_kind(value)}, no plain tensor; save a plain one"))
    if not 0 <= len(arguments) - _NEEDED[kind] <= 1:
        raise ValueError(f"is rebuilt from {len(arguments)} arguments, not {_NEEDED[kind]}; {_DAMAGED}")
    for more in arguments[_NEEDED[kind] :]:
        if more is not None and (not isinstance(more, Table) or more.pairs):
            raise ValueError(
                "is a lazily negated or conjugate view; save it as `.resolve_neg().resolve_conj()`"
            )
    dtype = arguments[6] if kind == "tensor_v3" else None
    if dtype is not None and not isinstance(dtype, Global):
        raise ValueError(f"its dtype is {_kind(dtype)}; {_DAMAGED}")
    storage, offset, shape, strides = arguments[:4]
    return _View(storage, offset, shape, strides, dtype)


class _Storages:
    """Where the storages lie, and what the tensors say about them."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = members
        self._said: dict[str, tuple[str, int]] = {}
        """Dtype and items of each, as the first tensor in it says."""

    def of(self, view: _View) -> tuple[str, Member]:
        """The dtype of a view and the place of its storage; ValueError where it is not known, or not as it says."""
        match view.storage:
            case Persistent(("storage", Global() as kind, str() as key, _, int() as items)) if (
                0 <= items <= _LARGEST and type(key) is str
            ):
                stored = _STORAGES.get(kind.rpartition(".")[2])
            case _:
                raise ValueError(f"names no storage; {_DAMAGED}")
        named = kind if view.dtype is None else view.dtype
        dtype = stored if named is kind else _DTYPES.get(named.removeprefix("torch."))
        if dtype is None or stored is None:
            raise ValueError(f"is of {shown(named)}, which ramstream does not know; save it as another dtype")
        at = self._members.get(key)
        if at is None:
            raise ValueError(f"its storage data/{shown(key)} is not in the archive; {_DAMAGED}")
        if items * ITEMSIZE[stored] > at.size:
            raise ValueError(
                f"its storage should have {items:,} items of {stored}, data/{shown(key)} has {at.size:,} bytes; "
                f"{_DAMAGED}"
            )
        if self._said.setdefault(key, (stored, items)) != (stored, items):
            raise ValueError(
                f"its storage data/{shown(key)} is of another kind for another tensor; {_DAMAGED}"
            )
        return dtype, at


def _recipe(shape: tuple[int, ...], strides: tuple[int, ...]) -> Strided | None:
    """None where the elements lie one after the other. The stride of a dimension of size 1 says nothing."""
    expected = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1 and stride != expected:
            return Strided(tuple(stride if n != 1 else 0 for n, stride in zip(shape, strides, strict=True)))
        expected *= n
    return None
