"""How the loops are compiled: without the GIL, without fastmath, cached on disk.

What is compiled depends on the width (float32 or float64) only, never on the number of agents T or on their
dtypes: sources come as addresses and codes, blocks as rows of one array. Arguments that recur in the loops:
`room` (Room), `inputs` (Inputs), `rule` (Rule), `counts` (Counts), n = elements of the block.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from numba import config, njit


def _probe() -> None:
    """A function that shows where numba caches this folder's functions."""


def _cache_folder() -> Path | None:
    """Where the loops are cached; None where numba finds no place it may write to."""
    if config.DISABLE_JIT:
        return None
    try:
        return Path(njit(cache=True)(_probe).stats.cache_path)
    except RuntimeError:
        return None


def _drop_stale_caches(folder: Path) -> None:
    """Remove what was compiled before the newest of the sources was written.

    numba compiles a function anew when its own file changes, but not when a callee in another one does, and
    a stale callee would give wrong results in silence.
    """
    here = Path(__file__).parent
    sources = (*here.glob("*.py"), here.parent / "types.py", here.parent / "quantiles.py")
    newest = max(source.stat().st_mtime for source in sources)
    for index in (*folder.glob("*.nbi"), *folder.glob("cores/__pycache__/*.nbi")):
        with suppress(FileNotFoundError):  # another process drops them too
            if index.stat().st_mtime < newest or not index.stat().st_size:  # a crash may leave it empty
                index.unlink()


def compiled(loop: str) -> bool:
    """Whether a loop (`counting.count`) was compiled before; otherwise its first call does it, for a while."""
    return _folder is not None and any(_folder.glob(f"{loop}-*.nbi"))


_folder = _cache_folder()
if _folder is not None:
    _drop_stale_caches(_folder)


def core_folder() -> Path | None:
    """Where the sources of loops made at run time go; None where nothing can be cached."""
    if _folder is None:
        return None
    folder = _folder / "cores"
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


_how: dict[str, Any] = {
    "nogil": True,
    "cache": _folder is not None,
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
}

entry = njit(**_how)
"""A loop that Python calls."""

inner = njit(**_how, no_cpython_wrapper=True)
"""A loop that only loops call: without the wrappers they compile in half the time."""
