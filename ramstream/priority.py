"""A primary and an auxiliary value as one value that never leaves the primary's sign.

`fuse` has the properties that the abstract of *Primary Advantage Policy Optimization* publishes: auxiliary
supervision is kept where the objectives agree and attenuated smoothly where they conflict, and the sign is
always the primary's. It is NOT that paper's own formula, which is not public.

The functions take numpy arrays and torch tensors; neither library is loaded before it is needed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from ramstream.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

Values: TypeAlias = "float | np.number[Any] | NDArray[Any] | torch.Tensor"
Where: TypeAlias = Callable[[Any, Any, Any], Any]


def rule(p: Any, a: Any, w: Any, where: Where) -> Any:
    """p + w·a where the signs of p and a agree or one is 0, otherwise p·|p| / (|p| + w·|a|).

    For whatever knows `+ * /`, `abs`, comparisons and `& |`. Computed as p / (1 + w·|a| / |p|): p·a, p·|p| and
    |p| + w·|a| can leave the range of floats where the result does not.
    """
    conflict = (p > 0) & (a < 0) | (p < 0) & (a > 0)
    pull = w * a
    own = where(conflict, abs(p), 1.0)  # 0 / 0 would be left out, and still make gradients NaN
    return where(conflict, p / (1.0 + abs(pull) / own), p + pull)


def fuse(primary: Values, auxiliary: Values, weight: float = 1.0) -> Any:
    """Add auxiliary values to primary ones without ever changing a primary's sign.

        p + w·a                   where the signs of p and a agree, or one of them is 0
        p·|p| / (|p| + w·|a|)     where they conflict

    It meets the published properties of *Primary Advantage Policy Optimization* and is not that paper's formula.
    It is for values whose sign is their message: advantages of whole answers, normalised in their group (GRPO;
    see `group_normalised`), advantages of tokens (PPO), and deltas of weights. p and a should be of comparable
    size; the weight w says how much a counts.

    primary, auxiliary: numbers, numpy arrays or torch tensors, of shapes that broadcast; integers become floats.
    The result has their common shape and float dtype; numpy and torch give the same bits.

    * Where p ≠ 0 the result has p's sign: what underflows to 0 becomes the smallest number of that sign instead.
      So every sample with p > 0 stays above every one with p < 0. Where p = 0 the result is w·a.
    * In a conflict the magnitude falls from |p| towards 0 as |a| grows.
    * It is continuously differentiable in a (where p ≠ 0); at a = 0 the slope is w on both sides.
    * fuse(s·p, s·a) = s·fuse(p, a) for s > 0, but for rounding.
    * NaN in p or a gives NaN. An infinite p stays; an infinite w·a against a finite p leaves the smallest number
      of p's sign; NaN comes of two infinities in conflict, and of an infinite a with w = 0.

    UsageError where `weight` is negative or not finite (in the dtype, too), or the two are of different
    libraries.
    """
    if not 0 <= weight < math.inf:
        raise UsageError(f"fuse: weight is {weight}; it must be a finite number, 0 or more")
    if _is_tensor(primary) or _is_tensor(auxiliary):
        return _fuse_torch(primary, auxiliary, weight)
    if type(primary) in (int, float) and type(auxiliary) in (int, float):
        least = sys.float_info.min * sys.float_info.epsilon
        return _signed(float(primary), float(auxiliary), float(weight), lambda c, x, y: x if c else y, least)
    return _fuse_numpy(primary, auxiliary, weight)


def group_normalised(rewards: Any, axis: int = -1) -> Any:
    """GRPO's advantages: (r − mean) / std of each group along `axis`, std being that of the population.

    rewards: a numpy array (or what becomes one) or a torch tensor; integers become floats. The result is like
    it. Where a group has no spread (all equal, one sample, none) the advantages are exactly 0. A reward that is
    not finite makes its whole group NaN.

    *DeepSeekMath*, arXiv 2402.03300, section 4.1.2.
    """
    if _is_tensor(rewards):
        import torch

        r = rewards if rewards.is_floating_point() else rewards.to(torch.get_default_dtype())
        return _normalised(torch, r, axis) if r.numel() else r.clone()
    import numpy as np

    r = np.asarray(rewards)
    r = r.astype(r.dtype if r.dtype.kind == "f" else np.float64)
    with np.errstate(all="ignore"):
        return _normalised(np, r, axis) if r.size else r


def _normalised(xp: Any, rewards: Any, axis: int) -> Any:
    """Groups are moved to 0 .. 1 first, where neither sums overflow nor squares vanish."""
    half = rewards * 0.5
    low, high = xp.amin(half, axis=axis, keepdims=True), xp.amax(half, axis=axis, keepdims=True)
    one = xp.ones_like(low)
    placed = (half - low) / xp.where(high > low, high - low, one)
    centred = placed - xp.mean(placed, axis=axis, keepdims=True)
    spread = xp.sqrt(xp.mean(centred * centred, axis=axis, keepdims=True))
    return centred / xp.where(spread > 0, spread, one)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # not loaded: then there is no tensor
    return torch is not None and isinstance(value, torch.Tensor)


def _signed(p: Any, a: Any, w: Any, where: Where, least: Any) -> Any:
    """`rule`, with `least` of p's sign for what underflows to 0."""
    fused = rule(p, a, w, where)
    return where((fused == 0) & (p != 0), where(p > 0, least, -least), fused)


def _fuse_torch(primary: Any, auxiliary: Any, weight: float) -> Any:
    import torch

    for value in (primary, auxiliary):
        if not isinstance(value, torch.Tensor | int | float):
            raise UsageError(
                f"fuse: a torch.Tensor and a {type(value).__name__} do not mix; give two of a kind"
            )
    dtype = torch.result_type(primary, auxiliary)
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    device = (primary if _is_tensor(primary) else auxiliary).device
    p, a = (
        value.to(dtype) if _is_tensor(value) else torch.tensor(value, dtype=dtype, device=device)
        for value in (primary, auxiliary)
    )
    info = torch.finfo(dtype)
    least = torch.tensor(info.tiny * info.eps, dtype=dtype, device=device)
    w = torch.tensor(_within(weight, dtype, info), dtype=dtype, device=device)
    return _signed(p, a, w, torch.where, least)


def _fuse_numpy(primary: Any, auxiliary: Any, weight: float) -> Any:
    import numpy as np

    values = [value if type(value) in (int, float) else np.asarray(value) for value in (primary, auxiliary)]
    dtype = np.result_type(*values)
    if dtype.kind != "f":
        dtype = np.result_type(dtype, np.float64)
    info = np.finfo(dtype)
    with np.errstate(all="ignore"):
        p, a = (np.asarray(value, dtype) for value in values)
        w = dtype.type(_within(weight, dtype, info))
        return _signed(p, a, w, np.where, info.tiny * info.eps)[()]


def _within(weight: float, dtype: Any, info: Any) -> float:
    if weight > info.max:
        raise UsageError(f"fuse: weight is {weight}; it must be {info.max} or less for {dtype}")
    return weight
