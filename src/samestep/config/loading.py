"""From a file and overrides to a Config, with the origin of each value."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from samestep.config.aliases import ALIASES, apply_aliases
from samestep.config.plain_yaml import PlainLoader, parse_yaml
from samestep.config.schema import Config, contradictions
from samestep.errors import ConfigError, Mistake

_FREE_FORM = (
    "params",
    "distributed.network",
    "launch.environment",
    "optimizer.args",
    "schedule.args",
)
"""Keys whose insides are not ours to name."""


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and where each value that is not a default came from."""

    config: Config
    origins: Mapping[str, str]
    source: str

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Every key with its value and origin, in the schema's order."""
        for path, value in _flatten_model(self.config):
            yield path, value, self.origins.get(path, "default")


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The config of a YAML or JSON file (or a mapping), with `section.key=value` overrides."""
    return read_config(source, overrides).config


def read_config(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()
) -> LoadedConfig:
    """Like `load_config`, and keeps where each value came from."""
    if isinstance(source, Mapping):
        name, folder = "the config", Path.cwd()
        values = dict(_flatten(source))
        origins = dict.fromkeys(values, "mapping")
        mistakes: list[Mistake] = []
    else:
        path = Path(source)
        name, folder = str(path), path.resolve().parent
        values, origins, mistakes = _read_file(path)
        if "name" not in values:
            values["name"], origins["name"] = _default_name(path), "default"
    _apply_overrides(values, origins, overrides, mistakes)
    values, origins, doubled = apply_aliases(values, origins)
    mistakes += doubled
    config = _validate(values, origins, mistakes)
    if mistakes or config is None:
        raise ConfigError(name, mistakes)
    config._folder = folder
    return LoadedConfig(config, origins, name)


def _default_name(path: Path) -> str:
    return path.resolve().parent.name if path.stem == "config" else path.stem


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, str], list[Mistake]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(str(path), [Mistake("", f"cannot be read: {reason}")]) from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), [Mistake("", "is not UTF-8 text")]) from None
    # JSON may be indented with tabs, which YAML refuses; otherwise YAML reads it too.
    text = text.replace("\t", " ") if path.suffix == ".json" else text
    lines: dict[str, str] = {}
    try:
        document = yaml.compose(text, Loader=PlainLoader)
        plain = parse_yaml(text)
        doubled = list(_record_lines(document, "", lines))
    except yaml.YAMLError as error:
        message = " ".join(str(error).split())
        raise ConfigError(str(path), [Mistake("", f"is not valid YAML: {message}")]) from None
    except RecursionError:
        raise ConfigError(str(path), [Mistake("", "contains itself by an alias")]) from None
    if not isinstance(plain, dict):
        message = "holds no keys: a config is a mapping such as 'global_batch: 256'"
        raise ConfigError(str(path), [Mistake("", message)])
    values = dict(_flatten(plain))
    return values, {key: lines.get(key, "file") for key in values}, doubled


def _record_lines(node: yaml.Node | None, prefix: str, lines: dict[str, str]) -> Iterator[Mistake]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        path = f"{prefix}{key_node.value}"
        line = f"line {key_node.start_mark.line + 1}"
        if path in lines:
            yield Mistake(path, f"is already set on {lines[path]}: keep one of them", line)
        lines[path] = line
        yield from _record_lines(value_node, f"{path}.", lines)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and path not in _FREE_FORM:
            yield from _flatten(value, f"{path}.")
            if not value:  # it turns a section on that is off where it is not named
                yield path, {}
        else:
            yield path, value


def _flatten_model(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _flatten_model(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _apply_overrides(
    values: dict[str, Any],
    origins: dict[str, str],
    overrides: Sequence[str],
    mistakes: list[Mistake],
) -> None:
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            mistakes.append(Mistake(override, "is not an override: write section.key=value"))
            continue
        try:
            value = parse_yaml(text)
        except yaml.YAMLError:
            mistakes.append(Mistake(key, f"{text!r} is not a YAML value", "override"))
            continue
        top = next((name for name in _FREE_FORM if key.startswith(f"{name}.")), None)
        if top is not None and isinstance(values.get(top) or {}, dict):
            inner = key.removeprefix(f"{top}.")
            values[top] = _with(values.get(top) or {}, inner.split("."), value)
            origins[top] = f"{origins[top]} and override" if top in origins else "override"
            continue
        # The override replaces what the file says of the key, by whichever name it says it.
        target = _real_name(key)
        for other in list(values):
            inside = other.startswith(f"{key}.") and key not in ALIASES
            if _real_name(other) == target or inside:
                del values[other], origins[other]
        flat = dict(_flatten({key: value}))
        values.update(flat)
        origins.update(dict.fromkeys(flat, "override"))


def _real_name(key: str) -> str:
    return ALIASES[key].key if key in ALIASES else key


def _with(values: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """The nested mapping with one value set."""
    first, *rest = path
    inner = values.get(first)
    inner = inner if isinstance(inner, Mapping) else {}
    return {**values, first: _with(inner, rest, value) if rest else value}


def _validate(
    values: dict[str, Any], origins: dict[str, str], mistakes: list[Mistake]
) -> Config | None:
    """The config; or None, with the mistakes of the fields and, where the others allow, between."""
    config: Config | None
    try:
        config = Config.model_validate(_nest(values))
    except ValidationError as error:
        wrong = _field_mistakes(error.errors(), values, origins)
        mistakes += wrong.values()
        config = _without(values, set(wrong))
    if config is None:
        return None
    wrong_paths = {mistake.path for mistake in mistakes}
    for mistake in contradictions(config, wrong_paths):
        if mistake.path not in wrong_paths:
            mistakes.append(Mistake(mistake.path, mistake.message, origins.get(mistake.path, "")))
    return config


def _without(values: dict[str, Any], wrong: set[str]) -> Config | None:
    """The config with the wrong values left out, so that what is between fields is checked too."""
    sections = tuple(f"{path}." for path in wrong)
    rest = {
        path: value
        for path, value in values.items()
        if path not in wrong and not path.startswith(sections)
    }
    try:
        return Config.model_validate(_nest(rest))
    except ValidationError:
        return None


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    # Shorter paths first, so that a scalar where a section belongs meets its section's keys.
    for path in sorted(values, key=lambda p: p.count(".")):
        *sections, key = path.split(".")
        place = nested
        for section in sections:
            inner = place.setdefault(section, {})
            if not isinstance(inner, dict):
                inner = place[section] = {}
            place = inner
        place[key] = values[path]
    return nested


def _field_mistakes(
    errors: Sequence[ErrorDetails], values: Mapping[str, Any], origins: Mapping[str, str]
) -> dict[str, Mistake]:
    found: dict[str, Mistake] = {}
    for error in errors:
        path, known, inside_list = _schema_path(error["loc"])
        if path in found:
            continue
        inside = (origin for key, origin in origins.items() if key.startswith(f"{path}."))
        origin = origins.get(path) or next(inside, "")
        if not known:
            message = f"is not a key of this config{_nearest(path)}"
        elif inside_list:
            message = f"{inside_list}: {error['msg']}, not {_show(error['input'])}"
        else:
            message = f"you set {_show(values.get(path, error['input']))}, but {_expected(path)}"
        found[path] = Mistake(path, message, origin)
    return found


def _show(value: Any) -> str:
    return "nothing" if value is None else repr(value)


def _schema_path(location: tuple[int | str, ...]) -> tuple[str, bool, str]:
    """The config path of a pydantic location (which also names union members), if we know it, and
    the place inside a list of sections."""
    model: type[BaseModel] | None = Config
    path: list[str] = []
    for depth, part in enumerate(location):
        if model is None:
            break
        path.append(str(part))
        if part not in model.model_fields:
            return ".".join(path), False, ""
        annotation = model.model_fields[str(part)].annotation
        model = _section_of(annotation)
        if get_origin(annotation) is tuple and _section_of(get_args(annotation)[0]):
            inside = ".".join(map(str, location[depth + 1 :]))
            return ".".join(path), True, f"entry {inside}" if inside else ""
    return ".".join(path), True, ""


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if get_origin(annotation) is tuple:
        return None
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _field(path: str) -> Any:
    model: type[BaseModel] = Config
    *sections, name = path.split(".")
    for section in sections:
        inner = _section_of(model.model_fields[section].annotation)
        assert inner is not None, path
        model = inner
    return model.model_fields[name]


def _nearest(path: str) -> str:
    known = [key for key, _ in _flatten_schema(Config)] + list(ALIASES)
    last = path.rpartition(".")[2]
    match = [key for key in known if key.rpartition(".")[2] == last][:1]
    match = match or difflib.get_close_matches(path, known, n=1, cutoff=0.6)
    return f": did you mean {match[0]}?" if match else "; samestep config show lists the keys"


def schema_keys() -> list[str]:
    """Every key a config can set, sections left out."""
    return [k for k, field in _flatten_schema(Config) if _section_of(field.annotation) is None]


def describe_key(key: str) -> tuple[str, str, str, str]:
    """(key, what it takes, its default, its meaning) in words."""
    field = _field(key)
    default = field.get_default(call_default_factory=True)
    shown = "" if default is None else f"`{default}`"
    return key, _expected(key).removeprefix("it takes "), shown, field.description or ""


def _flatten_schema(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        section = _section_of(field.annotation)
        if section is not None:
            yield from _flatten_schema(section, f"{prefix}{name}.")


def _expected(path: str) -> str:
    field = _field(path)
    limits = [_LIMITS[type(m).__name__].format(m) for m in _metadata(field)]
    kinds = " or ".join(dict.fromkeys(_kinds(field.annotation)))
    return f"it takes {kinds}" + (f" ({', '.join(limits)})" if limits else "")


_LIMITS = {
    "Ge": "at least {0.ge}",
    "Gt": "above {0.gt}",
    "Le": "at most {0.le}",
    "Lt": "below {0.lt}",
    "_PydanticGeneralMetadata": "matching {0.pattern}",
}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _metadata(field: Any) -> list[Any]:
    def walk(annotation: Any) -> Iterator[Any]:
        for meta in getattr(annotation, "__metadata__", ()):
            yield from getattr(meta, "metadata", [meta])
        for inner in get_args(annotation):
            if not isinstance(inner, str):
                yield from walk(inner)

    found = [*field.metadata, *walk(field.annotation)]
    return [meta for meta in found if type(meta).__name__ in _LIMITS]


def _kinds(annotation: Any) -> Iterator[str]:
    origin = get_origin(annotation)
    if annotation in _KINDS:
        yield _KINDS[annotation]
    elif origin is Literal:
        choices = [str(choice) for choice in get_args(annotation)]
        yield choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    elif origin is tuple:
        yield "a list of " + next(iter(_kinds(get_args(annotation)[0]))).removeprefix("a ") + "s"
    elif origin is dict or _section_of(annotation) is annotation:
        of_text = origin is dict and "text" in _kinds(get_args(annotation)[1])
        yield "a mapping to texts" if of_text else "a mapping"
    elif origin in (Union, types.UnionType) or hasattr(annotation, "__metadata__"):
        for inner in get_args(annotation)[: 1 if hasattr(annotation, "__metadata__") else None]:
            if inner is not type(None):
                yield from _kinds(inner)
    else:
        yield "a value"
