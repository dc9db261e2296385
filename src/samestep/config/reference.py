"""The keys of a config as users meet them: in error messages, suggestions and docs/config.md."""

from __future__ import annotations

import difflib
import types
from collections.abc import Collection, Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from samestep.config.aliases import ALIASES
from samestep.config.bounds import Reason
from samestep.config.schema import Config


def schema_keys() -> list[str]:
    """Return every key a config can set, by its dotted path; sections themselves are left out."""
    return [key for key, field in flatten_schema(Config) if section_of(field.annotation) is None]


def describe_key(key: str) -> tuple[str, str, str, str]:
    """Return a key with what it takes, its default and its meaning, as text for a table's row."""
    field = _field_at(key)
    default = field.get_default(call_default_factory=True)
    shown = "required" if field.is_required() else "" if default is None else f"`{default}`"
    return key, accepted_values(key, reasons=False), shown, field.description or ""


_WORDS_FOR = {"batchsize": "global_batch", "batch": "global_batch", "bs": "global_batch"}
"""What people mean. The nearest key by letters, `batch_size`, makes a run depend on its ranks."""


def suggest_key(path: str, params: Collection[str] = ()) -> str:
    """Return what follows "is not a key": the nearest key that exists, or where to find the list.

    Args:
        params: The names in the config's own `params`, which are nearer than a key of ours.
    """
    last = path.rpartition(".")[2]
    if last in params:
        return f": did you mean params.{last}?"
    meant = _WORDS_FOR.get(path.lower().replace("_", "").replace("-", ""))
    if meant is not None:
        return f": did you mean {meant}?"
    known = [key for key, _ in flatten_schema(Config)] + list(ALIASES)
    match = [key for key in known if key.rpartition(".")[2] == last][:1]
    match = match or difflib.get_close_matches(path, known, n=1, cutoff=0.6)
    return f": did you mean {match[0]}?" if match else "; samestep show lists the keys"


def accepted_values(key: str, reasons: bool = True) -> str:
    """Return the types, choices and limits of a key, such as `a whole number (at least 1)`."""
    field = _field_at(key)
    limits = ", ".join(_limits_of(field))
    kinds = " or ".join(dict.fromkeys(_kinds(field.annotation)))
    why = "; ".join(meta.text for meta in _metadata(field) if isinstance(meta, Reason))
    limits += f": {why}" if why and reasons else ""
    return kinds + (f" ({limits})" if limits else "")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a field's type stands for; None for a value or a list of sections."""
    if get_origin(annotation) is tuple:
        return None
    for candidate in (annotation, *get_args(annotation)):
        # In Python 3.10 list[str] is an instance of type too, but issubclass refuses it.
        is_class = isinstance(candidate, type) and get_origin(candidate) is None
        if is_class and issubclass(candidate, BaseModel):
            section: type[BaseModel] = candidate
            return section
    return None


def section_at(path: str) -> type[BaseModel] | None:
    """Return the section that a key of the config stands for; None for a value."""
    return section_of(_field_at(path).annotation)


def _field_at(path: str) -> Any:
    model: type[BaseModel] = Config
    *sections, name = path.split(".")
    for section in sections:
        inner = section_of(model.model_fields[section].annotation)
        assert inner is not None, path
        model = inner
    return model.model_fields[name]


def flatten_schema(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of a model and its sections, by its dotted path, with its field."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        section = section_of(field.annotation)
        if section is not None:
            yield from flatten_schema(section, f"{prefix}{name}.")


_LIMITS = {
    "ge": "at least {}",
    "gt": "above {}",
    "le": "at most {}",
    "lt": "below {}",
    "meaning": "{}",
    "max_length": "at most {} entries",
}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _metadata(field: Any) -> list[Any]:
    def walk(annotation: Any) -> Iterator[Any]:
        for meta in getattr(annotation, "__metadata__", ()):
            yield from getattr(meta, "metadata", [meta])
        for inner in get_args(annotation):
            if not isinstance(inner, str):
                yield from walk(inner)

    return [*field.metadata, *walk(field.annotation)]


def _limits_of(field: Any) -> list[str]:
    # By attribute: which class holds a limit differs between releases of pydantic.
    return [
        text.format(_shown(getattr(meta, name)))
        for meta in _metadata(field)
        for name, text in _LIMITS.items()
        if getattr(meta, name, None) is not None
    ]


def _shown(limit: Any) -> str:
    """Return a limit as people write it: 1e9, not a row of zeros to be counted."""
    short = f"{limit:.0e}" if isinstance(limit, (int, float)) and abs(limit) >= 1e6 else ""
    if short and float(short) == limit:
        return short.replace("e+0", "e").replace("e+", "e")
    return f"{limit:.10g}" if isinstance(limit, float) else str(limit)


def _kinds(annotation: Any) -> Iterator[str]:
    origin = get_origin(annotation)
    if annotation in _KINDS:
        yield _KINDS[annotation]
    elif origin is Literal:
        choices = [str(choice) for choice in get_args(annotation)]
        yield choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    elif origin is tuple:
        yield "a list of " + next(iter(_kinds(get_args(annotation)[0]))).removeprefix("a ") + "s"
    elif origin is dict or section_of(annotation) is annotation:
        of_text = origin is dict and "text" in _kinds(get_args(annotation)[1])
        yield "a mapping to texts" if of_text else "a mapping"
    elif origin in (Union, types.UnionType) or hasattr(annotation, "__metadata__"):
        for inner in get_args(annotation)[: 1 if hasattr(annotation, "__metadata__") else None]:
            if inner is not type(None):
                yield from _kinds(inner)
    else:
        yield "a value"
