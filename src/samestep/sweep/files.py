"""A sweep's file, and those that it includes, as one set of values under our names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from samestep.config.layers import LAYER_KEYS, ONLY_IN_FILES, Layer, read_layers
from samestep.config.secrets import without_passwords
from samestep.errors import ConfigError, Mistake, TextError
from samestep.foreign.limits import check_values

_EXAMPLE = "a sweep is a mapping with base, space and objective"


@dataclass
class SweepFile:
    """What a sweep's files set, and what is wrong with them."""

    values: dict[str, Any]
    lines: dict[str, str] = field(default_factory=dict)
    """Where each key is set, by its dotted path."""
    mistakes: list[Mistake] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a person should know of how they were read."""

    @classmethod
    def of_mapping(cls, source: Mapping[str, Any]) -> SweepFile:
        """The values of a mapping, as a sweep's directory keeps them."""
        values, mistakes = with_objectives(source)
        mistakes += [Mistake(key, ONLY_IN_FILES) for key in LAYER_KEYS if key in values]
        values = {key: value for key, value in values.items() if key not in LAYER_KEYS}
        return cls(values, {}, mistakes)


def read_sweep_file(path: Path) -> SweepFile:
    """The values of a sweep's file and of those it names; the later wins, in sections key by key.

    Raises:
        ConfigError: if it cannot be read, or holds no keys.
    """
    try:
        stack = read_layers(path, _EXAMPLE)
    except ConfigError as error:
        # What is not YAML is shown as it is, and a storage's URL may be in it.
        shown = [replace(m, message=without_passwords(m.message)) for m in error.mistakes]
        raise ConfigError(error.source, shown) from None
    whole = SweepFile({}, {}, stack.mistakes)
    for layer in stack.layers:
        try:
            check_values(layer.values)
        except TextError as error:
            raise ConfigError(str(path.parent / layer.name), [Mistake("", str(error))]) from None
        _lay(whole, layer)
    names = [layer.name for layer in stack.layers]
    if len(names) > 1:
        whole.notes.append(f"the sweep is composed of {', '.join(names)}, of which the later wins")
    whole.notes += stack.platform_notes(lambda layer: layer.values)
    return whole


def _lay(whole: SweepFile, layer: Layer) -> None:
    values, mistakes = with_objectives(layer.values)
    whole.mistakes += [
        Mistake(m.path, m.message, m.origin or layer.lines.get(m.path, "")) for m in mistakes
    ]
    if isinstance(values.get("base"), str):
        values["base"] = layer.placed(values["base"])
    for key, value in values.items():
        below = whole.values.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            value = {**below, **value}
        whole.values[key] = value
    whole.lines |= layer.lines


def with_objectives(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Mistake]]:
    """Return the values with a list of objectives as the first one and further ones, and what is wrong with it."""
    given = values.get("objective")
    if not isinstance(given, list) or not given:
        return dict(values), []
    mistakes = []
    if "further_objectives" in values:
        mistakes.append(Mistake("objective", "further_objectives is set too: keep one of them"))
    return {**values, "objective": given[0], "further_objectives": given[1:]}, mistakes
