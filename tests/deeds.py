"""The task function that workers of a cluster run in tests: it does as files beside the models say.

deeds/kill-counting-0     one worker does half of a task, and is killed
deeds/stop-merging-0      one worker does a task, stops, and does it again when it is woken
deeds/slow                every task takes a little longer
deeds/log                 what was done: process, begin, end, pass
deeds/stopped, woke       the process that stopped; how it fared afterwards
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import distributed

from ramstream.engine import tasks
from ramstream.engine.worker import Setup, UnitResult, Work


def run_task(setup: Setup, works: Sequence[Work]) -> list[UnitResult]:
    if not _on_a_cluster():
        return tasks.run_task(setup, works)
    deeds = Path(setup.count.checkpoints[0].folder).parent / "deeds"
    title = "merging" if setup.out else "counting"
    begun = time.time()
    if _mine(deeds, f"kill-{title}"):
        tasks.run_task(setup, works[:1])
        os.kill(os.getpid(), signal.SIGKILL)
    if _mine(deeds, f"stop-{title}"):
        tasks.run_task(setup, works)
        (deeds / "stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return _woken(deeds, setup, works)
    if (deeds / "slow").exists():
        time.sleep(0.15)
    results = tasks.run_task(setup, works)
    with open(deeds / "log", "a") as log:
        log.write(f"{os.getpid()} {begun} {time.time()} {title}\n")
    return results


def _on_a_cluster() -> bool:
    try:
        distributed.get_worker()
    except ValueError:
        return False
    return True


def _mine(deeds: Path, name: str) -> bool:
    """Whether this is who is to do it: one file, one deed."""
    for file in deeds.glob(f"{name}-*"):
        with suppress(FileNotFoundError):
            file.unlink()
            return True
    return False


def _woken(deeds: Path, setup: Setup, works: Sequence[Work]) -> list[UnitResult]:
    time.sleep(0.2)  # others go first
    try:
        again = tasks.run_task(setup, works)  # into files that are open
        tasks.release(setup.token)
        tasks.run_task(setup, works)  # and by their paths
    except Exception as error:
        (deeds / "woke").write_text(repr(error))
        raise
    (deeds / "woke").write_text("well")
    return again


def held() -> int:
    """Setups that this process still holds buffers for."""
    return len(tasks._workers)
