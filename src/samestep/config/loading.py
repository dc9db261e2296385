"""Reads a file and overrides into a Config, with the origin of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from samestep.config.aliases import apply_aliases
from samestep.config.cross_field import contradictions
from samestep.config.reference import accepted_values, section_at, section_of, suggest_key
from samestep.config.references import References, has_references
from samestep.config.schema import Config
from samestep.config.secrets import without_values
from samestep.config.sources import FlatValues
from samestep.config.task_file import task_mistakes
from samestep.errors import ConfigError, Mistake
from samestep.parsing.limits import short

_SUGGESTIONS = 20
"""Unknown keys that get the nearest known one: to look for it takes milliseconds."""


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and the origin of each value that is not a default: a line, an override, ..."""

    config: Config
    origins: Mapping[str, str]
    source: str

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Yield every key with its value and origin, in the schema's order."""
        for path, value in _flatten_model(self.config):
            yield path, value, self.origins.get(path, "default")


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Load and validate the config of a run.

    Args:
        source: a YAML or JSON file, or a mapping with the same keys.
        overrides: texts of the form `section.key=value`, applied in order.

    Raises:
        ConfigError: with every mistake at once, each with its line and how to fix it.

    Example:
        >>> config = load_config("config.yaml", ["epochs=5", "loader.workers=2"])
        >>> config.loader.workers
        2
    """
    return read_config(source, overrides).config


def read_config(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), *, look: bool = False
) -> LoadedConfig:
    """Like `load_config`, but also returns where each value came from.

    Args:
        look: whether the task's file must be here, and have the class.
    """
    if isinstance(source, Mapping):
        name, folder = "the config", Path.cwd()
        flat = FlatValues.from_mapping(source)
    else:
        path = Path(source)
        flat = FlatValues.from_file(path)
        name, folder = str(path), path.resolve().parent
        if "name" not in flat.values:
            flat.values["name"], flat.origins["name"] = _default_name(path), "default"
    flat.override(overrides)
    values, origins, doubled = apply_aliases(flat.values, flat.origins)
    mistakes = flat.mistakes + doubled
    config = _validate(values, origins, mistakes)
    if config is not None:
        config = _with_references(config, origins, mistakes)
        config._folder, config._platform_notes = folder, tuple(flat.notes)
        wrong = task_mistakes(config) if look else []
        mistakes += [Mistake(m.path, m.message, origins.get(m.path, "")) for m in wrong]
    if mistakes or config is None:
        raise ConfigError(name, mistakes)
    return LoadedConfig(config, origins, name)


def _with_references(config: Config, origins: dict[str, str], mistakes: list[Mistake]) -> Config:
    """Return the config whose params have the values that they refer to; adds what they cannot refer to."""
    if not has_references(config.params):
        return config
    references = References(config, origins)
    params = references.resolved()
    # A key whose own value is wrong has its default here, and is reported already.
    wrong = {mistake.path for mistake in mistakes}
    mistakes += [m for m in references.mistakes if references.found.get(m.path) not in wrong]
    origins["params"] = references.origin()
    return config.model_copy(update={"params": params})


def override_config(config: Config, overrides: Sequence[str]) -> Config:
    """Return a copy of a config with other values."""
    # Only what was set: else every default would count as a wish of the user's, against a DataLoader's.
    changed = load_config(config.model_dump(mode="json", exclude_unset=True), overrides)
    changed._folder, changed._platform_notes = config.folder, config.platform_notes
    return changed


def _default_name(path: Path) -> str:
    return path.resolve().parent.name if path.stem == "config" else path.stem


def _flatten_model(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _flatten_model(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _validate(values: dict[str, Any], origins: dict[str, str], mistakes: list[Mistake]) -> Config | None:
    """Return the config, or None; adds the mistakes of single fields and, if possible, between them."""
    config: Config | None
    try:
        config = Config.model_validate(nest(values))
    except ValidationError as error:
        wrong = _field_mistakes(error.errors(), values, origins)
        mistakes += wrong.values()
        config = _config_without(values, set(wrong))
    if config is None:
        return None
    wrong_paths = {mistake.path for mistake in mistakes}
    for mistake in contradictions(config, wrong_paths):
        if mistake.path not in wrong_paths:
            mistakes.append(Mistake(mistake.path, mistake.message, origins.get(mistake.path, "")))
    return config


def _config_without(values: dict[str, Any], wrong: set[str]) -> Config | None:
    """Return the config without the wrong values, so that contradictions are reported as well."""
    sections = tuple(f"{path}." for path in wrong)
    rest = {path: value for path, value in values.items() if path not in wrong and not path.startswith(sections)}
    try:
        return Config.model_validate(nest(rest))
    except ValidationError:
        return None


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted keys as nested mappings."""
    nested: dict[str, Any] = {}
    # Shorter paths first: the keys of a section replace a scalar in the section's place.
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
    unknown = 0
    for error in errors:
        path, known, inside_list = _schema_path(error["loc"])
        if path in found:
            continue
        inside = (origin for key, origin in origins.items() if key.startswith(f"{path}."))
        origin = origins.get(path) or next(inside, "")
        if not known:
            unknown += 1
            params = values.get("params")
            own = params if isinstance(params, Mapping) else ()
            near = suggest_key(path, own) if unknown <= _SUGGESTIONS else ""
            message = f"is not a key of this config{near}"
        elif inside_list:
            message = f"{inside_list}: {error['msg']}, not {_show(error['input'])}"
        else:
            found_value = _show(without_values(path, values.get(path, error["input"])))
            message = f"you set {found_value}, but it takes {accepted_values(path)}"
            if path == "resume.checkpoint" and isinstance(error["input"], bool):
                message += ": never starts from the beginning, auto resumes where it can"
            section = section_at(path)
            if section is not None and isinstance(error["input"], int | float):
                message += f", such as {{{next(iter(section.model_fields))}: {error['input']}}}"
        found[path] = Mistake(path, message, origin)
    return found


def _show(value: Any) -> str:
    return "nothing" if value is None else short(repr(value))


def _schema_path(location: tuple[int | str, ...]) -> tuple[str, bool, str]:
    """Return the key of a pydantic location (which also names union members), whether that key exists, and
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
        model = section_of(annotation)
        if get_origin(annotation) is tuple and section_of(get_args(annotation)[0]):
            inside = ".".join(map(str, location[depth + 1 :]))
            return ".".join(path), True, f"entry {inside}" if inside else ""
    return ".".join(path), True, ""
