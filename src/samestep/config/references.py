"""`params` that refer to other keys of the config: `total: ${epochs}` is the number that epochs is set to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from samestep.config.aliases import real_name
from samestep.config.reference import schema_keys, suggest_key
from samestep.config.schema import Config
from samestep.errors import Mistake

_REFERENCE = re.compile(r"\$\{([a-z][a-z0-9_]*(?:\.[A-Za-z0-9_-]+)*)\}")
"""A whole value in lower case: other texts with ${...} in them are the task's own."""

_MOST = 1_000
"""References of one config: ten params that each name another one twice are a thousand already."""


@dataclass
class References:
    """The params of a config with the values of the keys that they refer to.

    Args:
        origins: Where its values come from, by key; those that are not in it are defaults.
    """

    config: Config
    origins: Mapping[str, str]
    mistakes: list[Mistake] = field(default_factory=list)
    found: dict[str, str] = field(default_factory=dict)
    """The key that each param refers to."""
    count: int = 0
    """References so far, on all ways."""

    def resolved(self) -> dict[str, Any]:
        """Return the params; what cannot be resolved is left as it is, and is one of the mistakes."""
        return {name: self._resolve(value, f"params.{name}", ()) for name, value in self.config.params.items()}

    def _resolve(self, value: Any, path: str, way: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {name: self._resolve(v, f"{path}.{name}", way) for name, v in value.items()}
        if isinstance(value, list):
            return [self._resolve(v, f"{path}.{at}", way) for at, v in enumerate(value)]
        match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            return value
        key = real_name(match[1])
        if not way:
            self.found[path] = key
        return self._value_of(key, value, path, way)

    def _value_of(self, key: str, written: str, path: str, way: tuple[str, ...]) -> Any:
        start = way[0] if way else path
        # Also a param that holds the reference, such as one in a list that is referred to.
        if any(f"{at}.".startswith(f"{key}.") for at in (*way, path)):
            circle = " -> ".join((*way, path, key))
            return self._wrong(start, written, f"{written} leads back to itself: {circle}")
        self.count += 1
        if self.count > _MOST:
            if self.count > _MOST + 1:
                return written  # which is said once
            message = f"the params refer to each other more than {_MOST:,} times: name keys directly"
            return self._wrong(start, written, message)
        if key.startswith("params."):
            held, known = _inside(self.config.params, key.split(".")[1:])
            if not known:
                near = ", ".join(f"params.{name}" for name in self.config.params)
                return self._wrong(start, written, f"{written}: there is no {key}; there are {near}")
            return self._resolve(held, key, (*way, path))
        if key.startswith("launch."):
            return self._wrong(start, written, f"{written}: what launch holds is not for tasks")
        if key not in schema_keys():
            what = "is a section" if _is_section(key) else "is not a key of this config"
            more = ": name a key in it" if _is_section(key) else suggest_key(key)
            return self._wrong(start, written, f"{written}: {key} {what}{more}")
        value, _ = _inside(self._values, key.split("."))  # None in a section that is off
        if value is None and key not in self.origins:
            return self._wrong(start, written, f"{written}: {key} is not set: set it, or give the value here")
        return value

    @cached_property
    def _values(self) -> dict[str, Any]:
        return self.config.model_dump(mode="json", exclude={"params", "launch"})

    def _wrong(self, path: str, written: str, message: str) -> str:
        self.mistakes.append(Mistake(path, message, self.origins.get("params", "")))
        return written

    def origin(self) -> str:
        """Return where the params come from, with what they refer to."""
        own = self.origins.get("params", "default")
        others = ", ".join(f"{path.removeprefix('params.')} from {key}" for path, key in self.found.items())
        return f"{own}; {others}" if others else own


def _inside(values: Any, path: list[str]) -> tuple[Any, bool]:
    for name in path:
        if not isinstance(values, Mapping) or name not in values:
            return None, False
        values = values[name]
    return values, True


def _is_section(key: str) -> bool:
    return any(known.startswith(f"{key}.") for known in schema_keys()) or key == "params"


def has_references(values: Any) -> bool:
    """Return whether any value is written as a reference."""
    return any(isinstance(v, str) and _REFERENCE.fullmatch(v) for v in _leaves(values))


def _leaves(values: Any) -> Iterator[Any]:
    if isinstance(values, (Mapping, list)):
        for inner in values.values() if isinstance(values, Mapping) else values:
            yield from _leaves(inner)
    else:
        yield values
