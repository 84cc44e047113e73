"""From a recipe to a configuration file that describes the same merge, and that mergekit accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os.path import exists
from pathlib import Path
from typing import Any

import yaml

from ramstream import durable, methods
from ramstream.checkpoint.wording import shown
from ramstream.config.recipe import MERGEKIT, OPTIONS, SPELLINGS, Recipe
from ramstream.errors import PlanError, UsageError
from ramstream.methods import Method
from ramstream.plan.matching import MatchOptions
from ramstream.settings import Rule, Setting
from ramstream.types import Dtype, config_name, parse_dtype

_HEAD = """\
# ramstream merge THIS_FILE -o OUT   (paths of models are relative to where that is run)
# mergekit ignores what stands under ramstream, and computes in float32 only where dtype says so.
"""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Gradients on one line, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        numbers = all(isinstance(item, float) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=numbers)


def render(recipe: Recipe) -> str:
    """The file's text. UsageError where the recipe means nothing, or more than such a file can say."""
    _refuse_unsayable([recipe.base, *recipe.agents])
    method = methods.create(recipe.method, recipe.parameters)
    name = _mergekit_name(method)
    theirs = MERGEKIT.get(name, frozenset())
    plain = methods.create(name, {})
    shared: dict[str, Any] = {}
    own: dict[str, tuple[tuple[Rule, ...], ...]] = {}
    ours: dict[str, Any] = {}
    for key in method.parameters():
        value, word = getattr(method, key), SPELLINGS.get(key, key)
        if word not in theirs and value == getattr(plain, key):
            continue
        if isinstance(value, Setting) and not value.complete:
            ours[key] = str(value)  # in YAML the default would count where it says nothing
        elif isinstance(value, Setting) and len(value.agents) > 1:
            own[word] = value.agents
        elif word in theirs or (isinstance(value, Setting) and key != "scale"):
            shared[word] = _yaml(value)
        else:
            ours[key] = _yaml(value)
    root: dict[str, Any] = {"merge_method": name.replace("-", "_"), "base_model": _model(recipe.base)}
    root["models"] = _models(recipe, method, own)
    if shared:
        root["parameters"] = shared
    root |= _dtypes(recipe.dtype, ours)
    ours |= _options(recipe.options)
    if ours:
        root["ramstream"] = ours
    text: str = yaml.dump(root, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=1000)
    return _HEAD + text


def write(path: Path, recipe: Recipe) -> None:
    """Write the recipe as a file. PlanError where one that says something else is in the way."""
    data = render(recipe).encode()
    try:
        if path.exists():
            if path.read_bytes() == data:
                return
            raise PlanError(
                f"{shown(str(path))} exists and says something else; remove it or name another file"
            )
        durable.write_whole(path, data)
    except OSError as error:
        raise PlanError(
            f"{shown(str(path))} cannot be written: {error.strerror}; name another file"
        ) from error


def _refuse_unsayable(names: Sequence[str]) -> None:
    """UsageError for models that a file would not give back as they are."""
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{shown(name)} is given twice, which a configuration file cannot say")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{shown(name)} is not UTF-8, which a configuration file has to be") from None


def _mergekit_name(method: Method) -> str:
    """The name that goes furthest with mergekit: an alias where the method does what mergekit means by it."""
    for alias, defaults in method.aliases.items():
        known = MERGEKIT.get(alias)
        if known and all(
            str(getattr(method, key)) == text for key, text in defaults.items() if key not in known
        ):
            return alias
    return method.name()


def _models(
    recipe: Recipe, method: Method, own: Mapping[str, tuple[tuple[Rule, ...], ...]]
) -> list[dict[str, Any]]:
    names = (recipe.base, *recipe.agents) if method.base_is_model else recipe.agents
    entries = []
    for i, name in enumerate(names):
        entry: dict[str, Any] = {"model": _model(name)}
        if own:
            entry["parameters"] = {word: _yaml(Setting((agents[i],))) for word, agents in own.items()}
        entries.append(entry)
    return entries


def _model(name: str) -> Any:
    """How mergekit writes a model whose name holds its own signs."""
    if (
        "+" in name
        or name.count("@") > 1
        or ("@" in name and (exists(name) or exists(name.partition("@")[0])))
    ):
        return {"model": {"path": name}}
    return name


def _yaml(value: Any) -> Any:
    """A parameter as YAML has it."""
    if not isinstance(value, Setting):
        return value
    (rules,) = value.agents
    points = [list(rule.points) if len(rule.points) > 1 else rule.points[0] for rule in rules]
    if len(rules) == 1 and rules[0].everywhere:
        return points[0]
    return [
        {"value": point} if rule.everywhere else {"filter": rule.filter, "value": point}
        for rule, point in zip(rules, points, strict=True)
    ]


def _dtypes(dtype: str | None, ours: dict[str, Any]) -> dict[str, str]:
    """The output's dtype; one that mergekit does not know goes to `ours`."""
    if dtype is None:
        return {}
    known = parse_dtype(dtype)
    if known in (Dtype.F8_E4M3, Dtype.F8_E5M2):
        ours["dtype"] = known.name.lower()
        return {"dtype": "float32"}
    return {"dtype": "float64" if known is Dtype.F64 else "float32", "out_dtype": config_name(known)}


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not as they are by default."""
    defaults = {**vars(MatchOptions()), "shard_size": None}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in options.items()
        if name in OPTIONS and value not in (None, defaults[name])
    }
