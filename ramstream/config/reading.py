"""From a configuration file to a recipe: every key is used, noted, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ramstream import methods
from ramstream.checkpoint.wording import shown
from ramstream.config.document import Place, load
from ramstream.config.parameters import Given, Parameters
from ramstream.config.problems import Problems, described
from ramstream.config.recipe import ABSENT_METHODS, CHOICES, LISTS, NOT_HERE, OPTIONS, WORDS, Recipe
from ramstream.config.references import reference
from ramstream.errors import UsageError
from ramstream.types import parse_dtype

_KEYS = (
    "merge_method",
    "base_model",
    "models",
    "parameters",
    "dtype",
    "out_dtype",
    "tokenizer_source",
    "ramstream",
)
_ARITHMETIC = {
    "F16": "mergekit would compute in float16 too; here arithmetic is float32, and only the output is rounded",
    "BF16": "mergekit would compute in bfloat16 too; here arithmetic is float32, and only the output is rounded",
    "F64": "mergekit would compute in float64; here arithmetic is float32, but for tensors stored as float64",
}


def read(path: Path) -> Recipe:
    """The merge that a file describes; model paths are relative to the current folder, as in mergekit.

    UsageError lists every problem of what it says, PlanError says that it cannot be read.
    """
    document = load(path)
    problems, notes = Problems(document), list[str]()
    if not isinstance(document.root, dict):
        problems.add((), f"is {described(document.root)}; give a mapping with merge_method and models")
        problems.stop()
    top = problems.mapping((), document.root, _KEYS, NOT_HERE)
    ours = problems.mapping(("ramstream",), top.get("ramstream"))
    method = _method(problems, top.get("merge_method"))
    base, models = _models(problems, notes, top)
    options = _options(problems, ours)
    dtype = _dtype(problems, notes, top, ours)
    parameters: dict[str, str] = {}
    if method is not None:
        base, parameters = _merged(problems, notes, method, base, models, top, ours)
    _tokenizer(problems, notes, top.get("tokenizer_source"), base)
    problems.stop()
    assert method is not None
    assert base is not None
    agents = tuple(name for name in models if name != base)
    try:
        methods.create(method, parameters).check_agents(len(agents))
    except UsageError as error:
        raise UsageError(f"{document.file}: {error}") from None
    return Recipe(base, agents, method, parameters, dtype, options, tuple(notes))


def _method(problems: Problems, value: Any) -> str | None:
    if value is None:
        problems.add((), "has no merge_method")
        return None
    word = problems.word(("merge_method",), value)
    if word is None:
        return None
    try:
        methods.find(word)
    except UsageError as error:
        known = ", ".join(methods.available())
        absent = word.strip().lower().replace("_", "-") in ABSENT_METHODS
        text = (
            f"is mergekit's {word}, which is not here; use one of {known}"
            if absent
            else f"is unknown: {error}"
        )
        problems.add(("merge_method",), text)
        return None
    return word


def _models(problems: Problems, notes: list[str], top: dict[str, Any]) -> tuple[str | None, dict[str, Given]]:
    """The base, if it is named, and the listed models with their own parameters."""
    base = None
    if top.get("base_model") is not None:
        base = reference(problems, notes, ("base_model",), top["base_model"])
    if top.get("models") is None:
        problems.add((), "has no models")
        return base, {}
    models: dict[str, Given] = {}
    for i, entry in enumerate(problems.items(("models",), top["models"])):
        place = ("models", i)
        if not isinstance(entry, dict):
            problems.add(place, f"is {described(entry)}; write it as  - model: NAME")
            continue
        parts = problems.mapping(place, entry, ("model", "parameters"))
        name = reference(problems, notes, (*place, "model"), parts.get("model"))
        own = problems.mapping((*place, "parameters"), parts.get("parameters"))
        if name in models:
            problems.add((*place, "model"), f"is {shown(name)}, which is listed twice")
        elif name is not None:
            models[name] = Given((*place, "parameters"), own)
    return base, models


def _merged(
    problems: Problems,
    notes: list[str],
    method: str,
    base: str | None,
    models: dict[str, Given],
    top: dict[str, Any],
    ours: dict[str, Any],
) -> tuple[str | None, dict[str, str]]:
    """The base, which is the first model where the method needs none, and the parameters."""
    is_model = methods.find(method)[0].base_is_model
    if base is None and is_model:
        base = next(iter(models), None)
    elif base is None:
        problems.add((), f"has no base_model, which {method} needs")
    agents = [name for name in models if name != base]
    if models and not agents:
        problems.add(("models",), "holds only the base; list what is to be merged into it")
    common = Given(("parameters",), problems.mapping(("parameters",), top.get("parameters")))
    options = (*OPTIONS, "dtype")
    extra = Given(("ramstream",), {key: value for key, value in ours.items() if key not in options})
    taking = [base, *agents] if base is not None and is_model else agents
    given = {name: models.get(name, Given((), {})) for name in taking}
    found = Parameters(method, problems, notes)
    if base in models and not is_model and models[base].values:
        notes.append(f"{base} is the base, so its parameters among models count for nothing")
        found.translated([models[base]])
    return base, found.texts([common, extra], given)


def _dtype(problems: Problems, notes: list[str], top: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """The output's dtype: what stands under ramstream, else out_dtype, else dtype."""
    places: dict[Place, Any] = {
        ("ramstream", "dtype"): ours.get("dtype"),
        **{(key,): top.get(key) for key in ("out_dtype", "dtype")},
    }
    found = {place: problems.dtype(place, value) for place, value in places.items() if value is not None}
    computed = found.get(("dtype",))
    text = _ARITHMETIC.get(parse_dtype(computed).name) if computed else None
    if text:
        notes.append(f"dtype {top['dtype']}: {text}")
    return next((dtype for dtype in found.values() if dtype), None)


def _tokenizer(problems: Problems, notes: list[str], value: Any, base: str | None) -> None:
    """Only the base's tokenizer is taken."""
    if value is None or value == "base":
        return
    if value == "union" or reference(problems, notes, ("tokenizer_source",), value) != base:
        problems.add(
            ("tokenizer_source",),
            f"is {described(value)}, but no tokenizer is built here; the output has the base's, write base",
        )


def _options(problems: Problems, ours: dict[str, Any]) -> dict[str, Any]:
    """The matching options and the shard size under `ramstream`."""
    found: dict[str, Any] = {}
    for name, value in ours.items():
        place = ("ramstream", name)
        if value is None:
            continue
        if name in LISTS:
            values = value if isinstance(value, list) else [value]
            words = [problems.word((*place, i), word) for i, word in enumerate(values)]
            found[name] = tuple(word for word in words if word is not None)
        elif name in CHOICES:
            found[name] = problems.choice(place, value, CHOICES[name])
        elif name == "compare_dtype":
            found[name] = problems.dtype(place, value)
        elif name in WORDS:
            found[name] = str(value) if isinstance(value, int) else problems.word(place, value)
    return found
