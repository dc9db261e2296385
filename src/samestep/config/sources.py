"""Where config values come from: a file or a mapping, then overrides; flat, each with its origin.

Values are flat here: `loader.workers` is one key. Only what is inside a free-form key such as
`params` stays nested, since its names are the user's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from samestep.config.aliases import ALIASES
from samestep.config.plain_yaml import PlainLoader, parse_yaml
from samestep.errors import ConfigError, Mistake

_FREE_FORM = (
    "params",
    "distributed.network",
    "launch.environment",
    "optimizer.args",
    "schedule.args",
)
"""Keys whose inner names are not ours."""


@dataclass
class FlatValues:
    """Values by dotted key, where each comes from, and the mistakes found while reading them."""

    values: dict[str, Any]
    origins: dict[str, str]
    mistakes: list[Mistake] = field(default_factory=list)

    @classmethod
    def from_mapping(cls, source: Mapping[str, Any]) -> FlatValues:
        """The values of a nested mapping."""
        values = dict(_flatten(source))
        return cls(values, dict.fromkeys(values, "mapping"))

    @classmethod
    def from_file(cls, path: Path) -> FlatValues:
        """The values of a YAML or JSON file, with their lines.

        Raises:
            ConfigError: if it cannot be read or holds no mapping. A key that is set twice is one of
                the `mistakes`, so that it is reported together with all others.
        """
        text = _read_text(path)
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
        return cls(values, {key: lines.get(key, "file") for key in values}, doubled)

    def override(self, overrides: Sequence[str]) -> None:
        """Apply `section.key=value` texts in order; the last one of a key counts."""
        for override in overrides:
            key, equals, text = override.partition("=")
            if not equals or not key:
                message = "is not an override: write section.key=value"
                self.mistakes.append(Mistake(override, message))
                continue
            try:
                value = parse_yaml(text)
            except yaml.YAMLError:
                self.mistakes.append(Mistake(key, f"{text!r} is not a YAML value", "override"))
                continue
            self._set(key, value)

    def _set(self, key: str, value: Any) -> None:
        values, origins = self.values, self.origins
        top = next((name for name in _FREE_FORM if key.startswith(f"{name}.")), None)
        if top is not None and isinstance(values.get(top) or {}, dict):
            inner = key.removeprefix(f"{top}.")
            values[top] = _with_value(values.get(top) or {}, inner.split("."), value)
            origins[top] = f"{origins[top]} and override" if top in origins else "override"
            return
        # The override replaces the key of the file, whichever of its names the file uses.
        target = _real_name(key)
        for other in list(values):
            inside = other.startswith(f"{key}.") and key not in ALIASES
            if _real_name(other) == target or inside:
                del values[other], origins[other]
        flat = dict(_flatten({key: value}))
        values.update(flat)
        origins.update(dict.fromkeys(flat, "override"))


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(str(path), [Mistake("", f"cannot be read: {reason}")]) from None
    except UnicodeDecodeError:
        raise ConfigError(str(path), [Mistake("", "is not UTF-8 text")]) from None
    # JSON may be indented with tabs, which YAML refuses; otherwise YAML reads it too.
    return text.replace("\t", " ") if path.suffix == ".json" else text


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
            if not value:  # an empty section turns on what is off without it
                yield path, {}
        else:
            yield path, value


def _real_name(key: str) -> str:
    return ALIASES[key].key if key in ALIASES else key


def _with_value(values: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """The nested mapping with one value set."""
    first, *rest = path
    inner = values.get(first)
    inner = inner if isinstance(inner, Mapping) else {}
    return {**values, first: _with_value(inner, rest, value) if rest else value}
