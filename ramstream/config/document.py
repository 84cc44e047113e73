"""A YAML file as plain data, with the line of every value; whatever is wrong with it is one clear error.

Only strings, numbers, booleans, null, lists and mappings with strings for keys are read: no tag makes an object.
Keys that occur twice are refused, and so is what a few aliases expand to millions of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ramstream.checkpoint.wording import shown
from ramstream.errors import PlanError, UsageError

MOST_BYTES = 500_000
MOST_VALUES = 50_000
"""Values in a file, those behind an alias counted each time."""

Place = tuple[str | int, ...]
"""Keys and indices that lead to a value."""

_TAG = "tag:yaml.org,2002:"
_MERGE = "<<"
_SCALARS = {f"{_TAG}{kind}" for kind in ("str", "int", "float", "bool", "null")}


@dataclass(frozen=True)
class Document:
    """What a file holds."""

    file: str
    root: Any
    lines: dict[Place, int]

    def at(self, place: Place) -> str:
        """Where that is: `merge.yaml, line 7: models[0].parameters.weight`."""
        words = (f"[{word}]" if isinstance(word, int) else f".{shown(word)}" for word in place)
        known = next((place[:n] for n in range(len(place), -1, -1) if place[:n] in self.lines), ())
        return f"{self.file}, line {self.lines.get(known, 1)}: {''.join(words).removeprefix('.')}".rstrip(
            ": "
        )


def load(path: Path) -> Document:
    """Read a YAML file. PlanError where it cannot be read, UsageError naming file and line where it is no YAML."""
    file = shown(str(path))
    text = _text(path, file)

    def refuse(line: int | None, what: str) -> NoReturn:
        raise UsageError(f"{file}{'' if line is None else f', line {line}'}: {what}")

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        builder = _Builder(loader, refuse)
        root = None if node is None else builder.build(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = str(error.problem or error.context)
        if "single document" in str(error.context):
            what = "several documents in one file; give one"
        refuse(mark.line + 1 if mark else None, f"no YAML: {what}")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        refuse(line, f"no YAML: the character U+{error.character:04X} is not allowed")
    except RecursionError:
        refuse(None, "nested too deeply")
    except ValueError as error:  # what PyYAML lets through: escapes beyond Unicode
        refuse(None, f"no YAML: {error}")
    return Document(file, root, builder.lines)


def _text(path: Path, file: str) -> str:
    try:
        with path.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PlanError(f"{file} cannot be read: {reason}") from error
    if len(data) > MOST_BYTES:
        raise UsageError(f"{file} has more than {MOST_BYTES:,} bytes; a configuration file is smaller")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{file}, line {line}: is not UTF-8 text (byte {error.start})") from None


class _Builder:
    """Turns YAML nodes into plain data."""

    def __init__(self, loader: Any, refuse: Callable[[int, str], NoReturn]) -> None:
        self.lines: dict[Place, int] = {}
        self._loader, self._refuse = loader, refuse
        self._left = MOST_VALUES

    def build(self, node: Any, place: Place, line: int | None = None) -> Any:
        """The value of a node; `line` is that of its key."""
        own = node.start_mark.line + 1
        self._left -= 1
        if self._left < 0:
            self._refuse(own, f"more than {MOST_VALUES:,} values, aliases expanded")
        self.lines[place] = own if line is None else line
        if node.tag == f"{_TAG}seq" and isinstance(node, yaml.SequenceNode):
            return [self.build(child, (*place, i)) for i, child in enumerate(node.value)]
        if node.tag == f"{_TAG}map" and isinstance(node, yaml.MappingNode):
            return self._mapping(node, place)
        if node.tag in _SCALARS and isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.ScalarNode):
            text = f"{shown(node.value)} is read by YAML as {shown(kind)}; put it in quotes if it is a string"
        else:
            text = f"the tag {shown(kind)} is not read; leave it out"
        return self._refuse(own, text)

    def _mapping(self, node: Any, place: Place) -> dict[str, Any]:
        pairs: dict[str, tuple[int, Any]] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            word = self._key(key, line)
            if word in pairs:
                self._refuse(line, f"the key {shown(word)} occurs twice, first in line {pairs[word][0]}")
            pairs[word] = line, value
        result: dict[str, Any] = {}
        if _MERGE in pairs:
            _, sources = pairs.pop(_MERGE)
            listed = sources.value if isinstance(sources, yaml.SequenceNode) else [sources]
            for source in reversed(listed):  # an earlier one takes precedence
                value = self.build(source, place)
                if not isinstance(value, dict):
                    self._refuse(source.start_mark.line + 1, "<< takes a mapping, or a list of mappings")
                result |= value
            self.lines[place] = node.start_mark.line + 1
        for word, (line, value) in pairs.items():
            result[word] = self.build(value, (*place, word), line)
        return result

    def _key(self, key: Any, line: int) -> str:
        if isinstance(key, yaml.ScalarNode) and key.tag == f"{_TAG}merge":
            return _MERGE
        if not isinstance(key, yaml.ScalarNode) or key.tag != f"{_TAG}str":
            word = shown(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            self._refuse(line, f"the key {word} is not a string; put it in quotes")
        return str(self._scalar(key))

    def _scalar(self, node: Any) -> Any:
        line = node.start_mark.line + 1
        if ":" in node.value and node.tag in (f"{_TAG}int", f"{_TAG}float"):
            self._refuse(
                line, f"{shown(node.value)} is read by YAML as a number of base 60; put it in quotes"
            )
        try:
            value = self._loader.construct_object(node)
            if isinstance(value, str):
                value.encode()
        except UnicodeEncodeError:
            self._refuse(line, "a string holds half of a character (a lone surrogate)")
        except (ValueError, KeyError, IndexError):
            kind = node.tag.removeprefix(_TAG)
            self._refuse(line, f"{shown(node.value)} is no {shown(kind)}; put it in quotes if it is a string")
        return value
