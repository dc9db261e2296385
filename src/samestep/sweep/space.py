"""The space of a sweep: for each key of the config, a range or a list of values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from samestep.errors import Mistake, TextError

FORMS = {
    "uniform": "[low, high]", "loguniform": "[low, high]", "int": "[low, high]", "logint": "[low, high]",
    "choice": "[value, value, ...]",
}  # fmt: skip
_EXAMPLE = "{loguniform: [1e-5, 1e-2]}, {uniform: [0, 0.5]}, {int: [1, 8]} or {choice: [32, 64]}"
_MOST_GRID = 1_000_000


@dataclass(frozen=True)
class Domain:
    """The values that one key may get."""

    kind: str
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    choices: tuple[Any, ...] = ()

    @property
    def is_log(self) -> bool:
        return self.kind in ("loguniform", "logint")

    @property
    def is_whole(self) -> bool:
        return self.kind in ("int", "logint")

    def samples(self) -> Iterator[Any]:
        """Values that the config must take: the ends of a range, or every choice."""
        yield from self.choices if self.kind == "choice" else (self.low, self.high)

    def grid(self) -> tuple[Any, ...] | None:
        """Return all values; None if there are endlessly many."""
        if self.kind == "choice":
            return self.choices
        step = self.step if self.step is not None else (1 if self.kind == "int" else None)
        if step is None:
            return None
        count = int((self.high - self.low) / step + 1e-9) + 1
        return tuple(self.low + step * at for at in range(min(count, _MOST_GRID)))


Space = Mapping[str, Domain]


def encoded(domain: Domain, value: Any) -> Any:
    """Return a value as Optuna keeps it: a choice among lists or mappings by its text."""
    return json.dumps(value) if _by_text(domain) else value


def decoded(domain: Domain, value: Any) -> Any:
    """Return the value that Optuna's stands for."""
    if not _by_text(domain):
        return value
    return next(choice for choice in domain.choices if json.dumps(choice) == value)


def _by_text(domain: Domain) -> bool:
    plain = (str, int, float, bool, type(None))
    return domain.kind == "choice" and not all(isinstance(c, plain) for c in domain.choices)


def parse_space(given: Mapping[str, Any]) -> tuple[dict[str, Domain], list[Mistake]]:
    """Return the domains of a `space:` section, and what is wrong with the others."""
    space: dict[str, Domain] = {}
    mistakes: list[Mistake] = []
    if not given:
        mistakes.append(Mistake("space", "is empty: name at least one key, such as optimizer.lr"))
    for key, value in given.items():
        try:
            space[key] = _domain(value)
        except TextError as error:
            mistakes.append(Mistake(f"space.{key}", str(error)))
    return space, mistakes


def _domain(value: Any) -> Domain:
    if not isinstance(value, Mapping):
        raise TextError(f"you set {value!r}, but it takes {_EXAMPLE}")
    value = _from_named_type(value)
    kinds = [kind for kind in FORMS if kind in value]
    others = [str(name) for name in value if name not in (*FORMS, "step")]
    if len(kinds) != 1 or others:
        found = ", ".join(map(str, value)) or "nothing"
        raise TextError(f"has {found}, but it takes one of {', '.join(FORMS)}, such as {_EXAMPLE}")
    kind = kinds[0]
    if kind == "choice":
        return _choice(value)
    return _range(kind, value[kind], value.get("step"))


def _from_named_type(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """`{type: uniform, min: 0, max: 1}` is `{uniform: [0, 1]}`, and `values` are choices."""
    if "type" not in value:
        return value
    kind = value["type"]
    rest = {k: v for k, v in value.items() if k not in ("type", "min", "max", "values")}
    if not isinstance(kind, str) or kind not in FORMS:
        raise TextError(f"has the type {kind!r}, but there are {', '.join(FORMS)}")
    missing = [n for n in (("values",) if kind == "choice" else ("min", "max")) if n not in value]
    if missing:
        raise TextError(f"is a {kind} without {' and '.join(missing)}")
    return {**rest, kind: value["values"] if kind == "choice" else [value["min"], value["max"]]}


def _choice(value: Mapping[str, Any]) -> Domain:
    choices = value["choice"]
    if not isinstance(choices, list) or not choices:
        raise TextError(f"choice is {choices!r}, but it takes a list of values")
    if "step" in value:
        raise TextError("step is for ranges: a choice has none")
    texts = [json.dumps(choice) for choice in choices]
    if len(set(texts)) < len(texts):
        raise TextError(f"choice has a value twice: {choices!r}")
    return Domain("choice", choices=tuple(choices))


def _range(kind: str, bounds: Any, step: Any) -> Domain:
    numbers = isinstance(bounds, list) and len(bounds) == 2 and all(map(_is_number, bounds))
    if not numbers:
        raise TextError(f"{kind} is {bounds!r}, but it takes {FORMS[kind]}, two numbers")
    low, high = bounds
    whole = kind in ("int", "logint")
    if whole and not (isinstance(low, int) and isinstance(high, int)):
        raise TextError(f"{kind} is {bounds!r}, but it takes two whole numbers")
    if low > high:
        raise TextError(f"{kind} is {bounds!r}: the bounds are the wrong way round")
    if low == high:
        raise TextError(f"{kind} is {bounds!r}: there is one value only, which belongs into the base")
    if kind.startswith("log") and low <= 0:
        raise TextError(f"{kind} is {bounds!r}: a logarithm needs bounds above 0")
    if step is not None and (
        kind.startswith("log") or not _is_number(step) or step <= 0 or (whole and step != int(step))
    ):
        raise TextError(f"step is {step!r}: it takes a number above 0, in uniform and int")
    if whole:
        return Domain(kind, low, high, step)
    return Domain(kind, float(low), float(high), step)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
