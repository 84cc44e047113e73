"""How the loops are compiled: without the GIL, without fastmath, cached on disk.

What is compiled depends on the width (float32 or float64) only, never on the number of agents T or on their
dtypes: sources come as addresses and codes, blocks as rows of one array. Arguments that recur in the loops:
`room` (Room), `inputs` (Inputs), `rule` (Rule), `counts` (Counts), n = elements of the block.
"""

from __future__ import annotations

from pathlib import Path

from numba import njit

entry = njit(nogil=True, cache=True, error_model="numpy", no_cfunc_wrapper=True)
"""A loop that Python calls."""

inner = njit(nogil=True, cache=True, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)
"""A loop that only loops call: without the wrappers they compile in half the time."""


def _drop_stale_caches() -> None:
    """Remove what was compiled before the newest of these files was written.

    numba compiles a function anew when its own file changes, but not when a callee in another one does, and
    a stale callee would give wrong results in silence.
    """
    here = Path(__file__).parent
    newest = max(source.stat().st_mtime for source in here.glob("*.py"))
    for index in (here / "__pycache__").glob("*.nbi"):
        if index.stat().st_mtime < newest:
            index.unlink(missing_ok=True)


_drop_stale_caches()
