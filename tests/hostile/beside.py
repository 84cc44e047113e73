"""What lies beside the weights of a base or an agent, and is no plain file, or a plain one that is odd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hostile.places import link, pipe, ring, sparse

Make = Callable[[Path], object]


def _at(name: str, put: Make) -> Make:
    return lambda folder: put(folder / name)


def _text(name: str, text: str) -> Make:
    return lambda folder: (folder / name).write_text(text)


_READ = ("tokenizer_config.json", "chat_template.json", "chat_template.jinja", "README.md", "tokenizer.json")
"""Side files that planning or merging looks into."""

IGNORED: dict[str, Make] = {
    **{f"{name} is a pipe": _at(name, pipe) for name in _READ},
    **{f"{name} is a device": _at(name, link("/dev/zero")) for name in _READ},
    **{f"{name} is a ring of links": _at(name, ring) for name in _READ},
    **{f"{name} leads nowhere": _at(name, link("gone")) for name in _READ},
    "a template among others is a pipe": lambda folder: [
        (folder / "additional_chat_templates").mkdir(),
        pipe(folder / "additional_chat_templates" / "x.jinja"),
    ],
    "tokenizer.json of 1 TB": _at("tokenizer.json", sparse(1 << 40)),
    "folders that hold themselves": lambda folder: [
        (folder / "a").mkdir(),
        (folder / "a" / "up").symlink_to(".."),
        (folder / "a" / "self").symlink_to("."),
    ],
    "the root": _at("root", link("/")),
}
"""What must not keep a merge from being planned: it is left behind, and said so."""

READ: dict[str, Make] = {
    **{f"{name} is a folder": _at(name, Path.mkdir) for name in _READ},
    "tokenizer_config.json 100,000 deep": _text("tokenizer_config.json", "[" * 100_000),
    "tokenizer_config.json is no object": _text("tokenizer_config.json", "[]"),
    "tokenizer_config.json is no text": lambda folder: (folder / "tokenizer_config.json").write_bytes(
        b"\xff\xfe"
    ),
    "chat_template.json 100,000 deep": _text("chat_template.json", '{"a":' * 100_000),
    "templates that are no texts": _text(
        "tokenizer_config.json", '{"chat_template": [1, {"template": 2}, null]}'
    ),
    "the system's own file": _at("vocab.txt", link("/proc/self/environ")),
}
"""Odd contents that go along as they are, or are none."""


def many_paths(folder: Path, levels: int = 25) -> None:
    """Two links in each of some folders to the next one: 2^25 paths, none of which returns to itself."""
    for i in range(levels):
        (folder / f"d{i}").mkdir()
        (folder / f"d{i}" / "a").symlink_to(f"../d{i + 1}")
        (folder / f"d{i}" / "b").symlink_to(f"../d{i + 1}")
    (folder / f"d{levels}").mkdir()
    (folder / f"d{levels}" / "file.txt").write_text("x")


CONFIGS = (
    *(
        '{"architectures": 5}',
        '{"architectures": {"a": 1}}',
        '{"architectures": [[], null, 1.5]}',
        '{"vocab_size": {}}',
    ),
    *('{"text_config": []}', '{"text_config": {"architectures": true}}', '{"tie_word_embeddings": "no"}'),
    *('{"quantization_config": 7}', '{"torch_dtype": null}', '{"dtype": {"a": 1}}', '{"a": NaN}'),
    *(
        '{"tie_word_embeddings": true, "tie_word_embeddings": false}',
        '{"auto_map": {"AutoModel": "../../x--y.Z"}}',
    ),
)
"""Configs of a base with which an adapter that holds an embedding is planned, or refused, but nothing else."""
