"""Reads config values from files in layers or a mapping, then overrides; flat, each with its origin.

Values are flat here: `loader.workers` is one key. Only what is inside a free-form key such as
`params` stays nested, since its names are the user's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.config.aliases import ALIASES, SECTIONS, real_name
from samestep.config.layers import LAYER_KEYS, ONLY_IN_FILES, Layer, read_layers
from samestep.errors import ConfigError, Mistake, TextError
from samestep.parsing.limits import DEEPEST, check_shape, check_text, check_values, short
from samestep.parsing.plain_yaml import parse_yaml

_FREE_FORM = ("params", "distributed.network", "launch.environment", "optimizer.args", "schedule.args")
"""Keys whose inner names are not ours."""
_PATHS = ("task", "fold.file")
"""Keys whose values are relative to the file that sets them."""
_MOST_KEYS = 2_000
_MOST_VALUES = 100_000


@dataclass
class FlatValues:
    """Values by dotted key, where each comes from, and the mistakes found while reading them."""

    values: dict[str, Any]
    origins: dict[str, str]
    mistakes: list[Mistake] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the platform has changed."""
    _parts: dict[str, dict[str, str]] = field(default_factory=dict)
    """Where the values inside a mapping come from, by their names; the mapping itself by an empty one."""

    @classmethod
    def from_mapping(cls, source: Mapping[str, Any]) -> FlatValues:
        """Return the values of a nested mapping; raises a `ConfigError` if they cannot be a config's."""
        try:
            check_shape(source, _MOST_VALUES)
            values = _flat(source)
        except TextError as error:
            raise ConfigError("the config", [Mistake("", str(error))]) from None
        flat = cls(values, dict.fromkeys(values, "mapping"))._without_unusable()
        for key in [k for k in flat.values if k.partition(".")[0] in LAYER_KEYS]:
            flat.mistakes.append(Mistake(key, ONLY_IN_FILES))
            del flat.values[key], flat.origins[key]
        return flat

    @classmethod
    def from_file(cls, path: Path) -> FlatValues:
        """Return the values of a YAML or JSON file and of those it names, with their lines.

        Raises:
            ConfigError: if it cannot be read or holds no mapping. A key that is set twice is one of
                the `mistakes`, so that it is reported together with all others.
        """
        stack = read_layers(path, "a config is a mapping such as 'global_batch: 256'")
        whole = cls({}, {}, stack.mistakes)
        for layer in stack.layers:
            whole._lay(cls._of_layer(layer, path.parent), layer.lines)
        whole.notes += stack.platform_notes(lambda layer: _flat(layer.values))
        return whole

    @classmethod
    def _of_layer(cls, layer: Layer, folder: Path) -> FlatValues:
        try:
            values = _flat(layer.values)
        except TextError as error:
            raise ConfigError(str(folder / layer.name), [Mistake("", str(error))]) from None
        origins = {key: layer.lines.get(key, "file") for key in values}
        flat = cls(values, origins)._without_unusable()
        _place(flat.values, layer)
        return flat

    def _lay(self, upper: FlatValues, lines: Mapping[str, str]) -> None:
        """Put a layer over these values; of mappings with the user's own names, value by value."""
        self.mistakes += upper.mistakes
        joined = {
            key: _joined(self.values[key], value)
            for key, value in upper.values.items()
            if key in _FREE_FORM and isinstance(value, dict) and isinstance(self.values.get(key), dict)
        }
        for key in joined:
            self._note_parts(key, upper, lines)
        names = {real_name(key) for key in upper.values if key not in joined}
        # A value in a section's place replaces the section; an empty section only turns it on.
        whole = {key for key, value in upper.values.items() if key not in ALIASES and value != {}}
        for key in [k for k in self.values if real_name(k) in names or _is_inside(k, whole)]:
            del self.values[key], self.origins[key]
        self.values.update(upper.values | joined)
        self.origins.update({k: o for k, o in upper.origins.items() if k not in joined})

    def _note_parts(self, key: str, upper: FlatValues, lines: Mapping[str, str]) -> None:
        """Note where the values inside a mapping come from that layers have in common."""
        parts = self._parts.setdefault(key, {"": self.origins[key]})
        above = upper.origins[key]
        inner = dict(_flatten(upper.values[key]))
        parts |= {name: lines.get(f"{key}.{name}", above) for name in inner}
        others = [f"{name} from {origin}" for name, origin in parts.items() if name]
        self.origins[key] = f"{parts['']}; {', '.join(others)}" if others else parts[""]

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
        if key.partition(".")[0] in LAYER_KEYS:
            raise TextError(ONLY_IN_FILES)
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
        target = real_name(key)
        for other in list(values):
            whole = key not in ALIASES or isinstance(value, Mapping)
            inside = other.startswith(f"{key}.") and whole
            if real_name(other) == target or inside:
                del values[other], origins[other]
        flat = dict(_flatten({key: value}))
        values.update(flat)
        origins.update(dict.fromkeys(flat, "override"))


def _readable(text: str) -> str:
    """Return what was typed, for a message: on one line, and text that a terminal takes."""
    return short(text if text.isprintable() else ascii(text)[1:-1])


def _place(values: dict[str, Any], layer: Layer) -> None:
    """Let paths that are relative to a layer's file be relative to the first file."""
    for key in _PATHS:
        if isinstance(values.get(key), str):
            values[key] = layer.placed(values[key])
    classes = values.get("trackers.classes")
    if isinstance(classes, list):
        values["trackers.classes"] = [
            {**entry, "name": layer.placed(entry["name"])}
            if isinstance(entry, dict) and ".py:" in str(entry.get("name"))
            else entry
            for entry in classes
        ]


def _joined(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two nested mappings as one; the second one's values win."""
    found = dict(below)
    for name, value in above.items():
        both = isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
        found[name] = _joined(found[name], value) if both else value
    return found


def _is_inside(key: str, sections: set[str]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:end]) in sections for end in range(1, len(parts)))


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
            if not value and path not in SECTIONS:  # it turns on what is off without it
                yield path, {}
        else:
            yield path, value


def _with_value(values: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """Return the nested mapping with one value set."""
    first, *rest = path
    inner = values.get(first)
    inner = inner if isinstance(inner, Mapping) else {}
    return {**values, first: _with_value(inner, rest, value) if rest else value}
