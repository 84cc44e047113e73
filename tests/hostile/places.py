"""Files that are none, that lie elsewhere, or lead nowhere: what an index and the names in a folder may lead to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hostile.build import INDEX, NAME, good, index, shards

Make = Callable[[Path], object]

SECRET = "secret.safetensors"
"""A good file beside the folder, which nothing in the folder may lead to by its name."""


def secret(folder: Path) -> Path:
    """The file beside `folder`."""
    return good(folder.parent / SECRET, {"w": b"secret!!"})


def _shard(name: str) -> Make:
    """An index that looks for a tensor in a file of this name."""

    def make(folder: Path) -> None:
        good(folder / "a.safetensors", {"x": b"1"})
        index(folder, {"x": "a.safetensors", "w": name})

    return make


def _instead(name: str, put: Callable[[Path], object]) -> Make:
    """A good sharded folder with something else under one of its names."""

    def make(folder: Path) -> None:
        shards(folder, {"a.safetensors": {"x": b"1"}, "b.safetensors": {"y": b"2"}})
        (folder / "config.json").write_text("{}")
        (folder / name).unlink()
        put(folder / name)

    return make


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def ring(path: Path) -> None:
    """Three links that lead to one another."""
    path.symlink_to(f"{path.name}.1")
    (path.parent / f"{path.name}.1").symlink_to(f"{path.name}.2")
    (path.parent / f"{path.name}.2").symlink_to(path.name)


def sparse(size: int) -> Callable[[Path], object]:
    """A file of that many zeros that takes no room."""

    def make(path: Path) -> None:
        path.touch()
        os.truncate(path, size)

    return make


_NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (pipe, "is not a regular file"),
    "a folder": (Path.mkdir, "is not a regular file"),
    "a device": (link("/dev/zero"), "is not a regular file"),
    "a link to a folder": (link("."), "is not a regular file"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    "a ring of links": (ring, "Too many levels of symbolic links"),
    "a link to nowhere": (link("../gone"), "is a link to ../gone, which does not exist"),
    "a link to nowhere with an escape sequence": (link("\x1b[2J"), r"is a link to '\\x1b\[2J', which"),
}


def _table() -> dict[str, tuple[Make, str]]:
    """Each of them as a shard, the index and the config."""
    return {
        f"{name} is {what}": (_instead(name, put), f"agent/{name}: .*{message}")
        for name in ("b.safetensors", INDEX, "config.json")
        for what, (put, message) in _NO_FILES.items()
    }


PLACES: dict[str, tuple[Make, str]] = {
    **_table(),
    # where an index leads
    **{
        f"index leads to {name}": (
            _shard(name),
            f"index.json: shard {name} is not a plain name inside the folder",
        )
        for name in (
            *(
                f"../{SECRET}",
                f"sub/../../{SECRET}",
                f"./../{SECRET}",
                "/etc/passwd",
                "/dev/zero",
                "//dev/zero",
            ),
            *("/proc/self/environ", "a.safetensors/", "./a.safetensors", ".", "..", "sub//a.safetensors"),
        )
    },
    "index leads to the place of the secret": (
        lambda folder: _shard(os.fspath(folder.parent / SECRET))(folder),
        "index.json: shard /.*secret.safetensors is not a plain name inside the folder",
    ),
    "index leads to a name with backslashes": (_shard("..\\secret.safetensors"), "not a plain name inside"),
    "index leads to a zero byte": (_shard("a.safetensors\0"), r"shard 'a.safetensors\\x00' is not a plain"),
    "index leads to a line break": (_shard("a\nb"), r"shard 'a\\nb' is not a plain name"),
    "index leads to an escape sequence": (
        _shard("\x1b]0;x\x07"),
        r"shard '\\x1b\]0;x\\x07' is not a plain name",
    ),
    "index leads to 100,000 letters": (_shard("x" * 100_000), "agent/'x{159}…: is missing"),
    "index leads to 100,000 folders": (_shard("x/" * 50_000 + "a"), "…: is missing"),
    "index leads to the user's home": (_shard("~/secret.safetensors"), "~/secret.safetensors: is missing"),
    "index leads to itself": (_shard(INDEX), f"agent/{INDEX}: is no safetensors file|JSON text"),
    # large files
    "config of 100 MB and a byte": (
        _instead("config.json", sparse(100_000_001)),
        "agent/config.json: has 100,000,001 bytes, more than the 100,000,000 expected",
    ),
    "index of 300 MB": (_instead(INDEX, sparse(300_000_000)), f"agent/{INDEX}: has 300,000,000 bytes"),
    "config is the system's own file": (
        _instead("config.json", link("/proc/self/environ")),
        "agent/config.json: is empty",
    ),
    # names in a folder
    "weights with an escape sequence in their name": (
        lambda folder: good(folder / "\x1b[2J.safetensors"),
        r"agent: its weights' name is '\\x1b\[2J.safetensors'; rename the file",
    ),
    "weights with bytes that are no text in their name": (
        lambda folder: good(Path(os.fsdecode(os.fsencode(folder) + b"/\xff.safetensors"))),
        r"agent: its weights' name is '\\udcff.safetensors'",
    ),
    "index with an escape sequence in its name": (
        lambda folder: (folder / "\x1b[2J.safetensors.index.json").write_text("{..."),
        r"agent/'\\x1b\[2J.safetensors.index.json': is not valid JSON",
    ),
    "files with line breaks in their names": (
        lambda folder: [(folder / f"{i}\nx.gguf").touch() for i in range(3)],
        r"holds GGUF.*'0\\nx.gguf'",
    ),
}
"""Faults of a folder `agent`."""


def _blob(folder: Path) -> None:
    """As the Hub's cache has it: a link into a folder beside, whose name says nothing."""
    (folder.parent / "blobs").mkdir()
    good(folder.parent / "blobs" / "0123", {"y": b"2"})
    _instead("b.safetensors", link("../blobs/0123"))(folder)


def _far_blob(folder: Path) -> None:
    """A link to a link, with an absolute target."""
    _blob(folder)
    (folder / "b.safetensors").unlink()
    (folder.parent / "blobs" / "4567").symlink_to("0123")
    (folder / "b.safetensors").symlink_to(folder.parent / "blobs" / "4567")


def _linked_folder(folder: Path) -> None:
    """A shard in a subfolder that is a link."""
    (folder.parent / "shards").mkdir()
    good(folder.parent / "shards" / "b.safetensors", {"y": b"2"})
    good(folder / "a.safetensors", {"x": b"1"})
    (folder / "sub").symlink_to("../shards")
    index(folder, {"x": "a.safetensors", "y": "sub/b.safetensors"})


def _linked_config(folder: Path) -> None:
    shards(folder, {"a.safetensors": {"x": b"1"}, "b.safetensors": {"y": b"2"}})
    (folder.parent / "config").write_text('{"model_type": "linked"}')
    (folder / "config.json").symlink_to("../config")


def _beside_a_ring(folder: Path) -> None:
    shards(folder, {"a.safetensors": {"x": b"1"}, "b.safetensors": {"y": b"2"}})
    ring(folder / "ring")
    pipe(folder / "pipe")
    (folder / "self").symlink_to(".")


LINKS: dict[str, Make] = {
    "a shard is a link to a blob": _blob,
    "a shard is a link to a link": _far_blob,
    "a shard lies in a linked folder": _linked_folder,
    "the config is a link": _linked_config,
    "rings and pipes lie beside": _beside_a_ring,
}
"""Folders whose tensors are `x` and `y`, and that open."""

__all__ = ["LINKS", "NAME", "PLACES", "SECRET", "link", "pipe", "ring", "secret", "sparse"]
