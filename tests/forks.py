"""Processes that run `ramstream` without the second that loading takes: a server that has loaded all forks them.

Grains are small, every unit is its own task and vouched for at once. A read and an fsync take a moment as on a real
disk, so that what happens to a process finds it anywhere. What a process writes is kept when it is killed, so fsync
does nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LONGEST = 60.0
"""Seconds after which a process hangs."""


class Forks:
    """The server; a context manager that ends it, and with it what still runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: set[int] = set()
        folder.mkdir()

    def __enter__(self) -> Forks:
        words = [sys.executable, __file__, self._folder]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen(list(map(str, words)), text=True, **pipes)
        assert self._ask({}) == {}, "the server is there"
        return self

    def __exit__(self, *_: object) -> None:
        for pid in list(self._running):
            os.kill(pid, signal.SIGKILL)
            self.wait(pid)
        self._server.communicate()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(question), file=self._server.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer

    def start(self, *words: object, after: float = 0.0, slow: float = 0.0, **environment: str) -> int:
        """A process that begins `after` so many seconds; `slow` is what reads and fsyncs take. Its number."""
        at = time.monotonic() + after
        wanted = {"words": list(map(str, words)), "at": at, "slow": slow, "environment": environment}
        pid = int(self._ask(wanted)["pid"])
        self._running.add(pid)
        return pid

    def wait(self, pid: int) -> tuple[int, str]:
        """Exit code, negative for a signal, and what was said on stderr."""
        code = int(self._ask({"wait": pid})["code"])
        self._running.discard(pid)
        return code, (self._folder / f"{pid}.err").read_text(errors="replace")

    def run(self, *words: object, **options: Any) -> tuple[int, str]:
        """A process, to its end."""
        return self.wait(self.start(*words, **options))


def _serve(folder: Path) -> None:
    sys.path.insert(0, os.fspath(Path(__file__).parent))
    from faults import Family, small_grains
    from runs import small_steps

    with small_grains(), small_steps():
        warm = Family(folder / "warm")
        assert warm.merge(folder / "loaded").code == 0
        for line in sys.stdin:
            wanted = json.loads(line)
            answer: dict[str, Any] = {}
            if "wait" in wanted:
                answer = {"code": _wait(wanted["wait"])}
            elif wanted:
                ready, there = os.pipe()
                pid = os.fork()
                if pid == 0:
                    _become(folder, wanted, there)
                os.close(there)
                os.read(ready, 1)
                os.close(ready)
                answer = {"pid": pid}
            print(json.dumps(answer), flush=True)


def _wait(pid: int) -> int:
    until = time.monotonic() + LONGEST
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1000


def _become(folder: Path, wanted: dict[str, Any], there: int) -> None:
    """Be `ramstream` with these words, and end; to `there` goes a byte when it begins."""
    code = 1
    try:
        null, said = os.open(os.devnull, os.O_RDWR), folder / f"{os.getpid()}.err"
        for target, descriptor in enumerate(
            (null, null, os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        ):
            os.dup2(descriptor, target)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.environ.update(wanted["environment"])
        _slow_down(wanted["slow"])
        from ramstream.cli import main

        sys.argv = ["ramstream", *wanted["words"]]
        os.write(there, b".")
        os.close(there)
        time.sleep(max(wanted["at"] - time.monotonic(), 0.0))
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    except KeyboardInterrupt:  # before it began
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _slow_down(seconds: float) -> None:
    preadv = os.preadv

    def read(*arguments: Any) -> int:
        time.sleep(seconds)
        return preadv(*arguments)

    os.fsync = lambda descriptor: time.sleep(seconds)
    if seconds:
        os.preadv = read


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
