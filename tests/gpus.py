"""Two GPUs that are none: all of ramstream believes in them, but for torch, which does their work on the CPU.

As a module to preload it makes a dask worker believe in them, which notes in the file $GPUS who merged on which.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ramstream.engine import limits
from ramstream.kernels.torch import TorchMerger

FREE = {"cuda:0": 10**9, "cuda:1": 10**9}


def stand_in(patch: pytest.MonkeyPatch, note: Callable[[str], object], free: dict[str, int] = FREE) -> None:
    """Have as many GPUs as `free` names; `note` gets the device of every merger that is made."""
    made = TorchMerger.__init__

    def make(self: TorchMerger, *arguments: Any, device: str, **more: Any) -> None:
        note(device)
        made(self, *arguments, device="cpu" if device in free else device, **more)

    patch.setattr(limits, "_gpus", lambda: len(free))
    patch.setattr(limits, "_free_on", free.__getitem__)
    patch.setattr(TorchMerger, "__init__", make)


def dask_setup(worker: object) -> None:
    """What dask calls in a worker that preloads this."""

    def note(device: str) -> None:
        with open(Path(os.environ["GPUS"]), "a") as file:
            file.write(f"{os.getpid()} {threading.get_ident()} {device}\n")

    stand_in(pytest.MonkeyPatch(), note)
