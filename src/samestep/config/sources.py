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
from samestep.errors import ConfigError, Mistake, TextError
from samestep.foreign.files import read_text
from samestep.foreign.limits import DEEPEST, check_shape, check_text, check_values, short
from samestep.foreign.plain_yaml import LARGEST_YAML, parse_yaml

_FREE_FORM = (
    "params",
    "distributed.network",
    "launch.environment",
    "optimizer.args",
    "schedule.args",
)
"""Keys whose inner names are not ours."""
_MOST_KEYS = 2_000
_MOST_VALUES = 100_000


@dataclass
class FlatValues:
    """Values by dotted key, where each comes from, and the mistakes found while reading them."""

    values: dict[str, Any]
    origins: dict[str, str]
    mistakes: list[Mistake] = field(default_factory=list)

    @classmethod
    def from_mapping(cls, source: Mapping[str, Any]) -> FlatValues:
        """The values of a nested mapping; raises a `ConfigError` if they cannot be a config's."""
        try:
            check_shape(source, _MOST_VALUES)
            values = _flat(source)
        except TextError as error:
            raise ConfigError("the config", [Mistake("", str(error))]) from None
        return cls(values, dict.fromkeys(values, "mapping"))._without_unusable()

    @classmethod
    def from_file(cls, path: Path) -> FlatValues:
        """The values of a YAML or JSON file, with their lines.

        Raises:
            ConfigError: if it cannot be read or holds no mapping. A key that is set twice is one of
                the `mistakes`, so that it is reported together with all others.
        """
        lines: dict[str, str] = {}
        doubled: list[Mistake] = []
        try:
            text = read_text(path, LARGEST_YAML)
            # JSON may be indented with tabs, which YAML refuses; otherwise YAML reads it too.
            text = text.replace("\t", " ") if path.suffix == ".json" else text
            plain = parse_yaml(text, lambda root: doubled.extend(record_lines(root, "", lines)))
            if not isinstance(plain, dict):
                raise TextError("holds no keys: a config is a mapping such as 'global_batch: 256'")
            values = _flat(plain)
        except TextError as error:
            raise ConfigError(short(repr(str(path))[1:-1]), [Mistake("", str(error))]) from None
        origins = {key: lines.get(key, "file") for key in values}
        return cls(values, origins, doubled)._without_unusable()

    def _without_unusable(self) -> FlatValues:
        """Turn values that no config can hold into mistakes, and leave the others."""
        for key, value in list(self.values.items()):
            try:
                check_text(key)
                check_values(value)
            except TextError as error:
                self.mistakes.append(Mistake(_readable(key), str(error), self.origins[key]))
                del self.values[key], self.origins[key]
        return self

    def override(self, overrides: Sequence[str]) -> None:
        """Apply `section.key=value` texts in order; the last one of a key counts."""
        for override in overrides:
            key, equals, text = override.partition("=")
            if not equals or not key:
                message = "is not an override: write section.key=value"
                self.mistakes.append(Mistake(_readable(override), message))
                continue
            try:
                value = parse_yaml(text)
                check_values(value)
            except TextError as error:
                message = f"{_readable(text)!r} is not a YAML value: it {error}"
                self.mistakes.append(Mistake(_readable(key), message, "override"))
                continue
            try:
                self._set(key, value)
            except TextError as error:
                self.mistakes.append(Mistake(_readable(key), str(error), "override"))

    def _set(self, key: str, value: Any) -> None:
        check_text(key)
        if key.count(".") >= DEEPEST:
            raise TextError(f"is a key of more than {DEEPEST} parts")
        values, origins = self.values, self.origins
        top = next((name for name in _FREE_FORM if key.startswith(f"{name}.")), None)
        if top is not None and isinstance(values.get(top) or {}, dict):
            inner = key.removeprefix(f"{top}.")
            changed = _with_value(values.get(top) or {}, inner.split("."), value)
            check_shape(changed, _MOST_VALUES)
            values[top] = changed
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


def _readable(text: str) -> str:
    """What was typed, for a message: on one line, and text that a terminal takes."""
    return short(text if text.isprintable() else ascii(text)[1:-1])


def record_lines(node: yaml.Node | None, prefix: str, lines: dict[str, str]) -> Iterator[Mistake]:
    """Note the line of every key of a mapping; those that are set twice are mistakes."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            continue  # which no key can be: what reads the values says so
        path = f"{prefix}{key_node.value}"
        line = f"line {key_node.start_mark.line + 1}"
        if path in lines:
            yield Mistake(path, f"is already set on {lines[path]}: keep one of them", line)
        lines[path] = line
        yield from record_lines(value_node, f"{path}.", lines)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    flat = dict(_flatten(values))
    if len(flat) > _MOST_KEYS:
        raise TextError(f"sets {len(flat):,} keys; a config has at most {_MOST_KEYS:,}")
    return flat


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
