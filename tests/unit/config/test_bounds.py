"""Every count has limits, which its message gives with their reason."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from samestep.config import load_config
from samestep.config.reference import accepted_values, schema_keys
from samestep.config.schema import Config
from tests.unit.config.configs import GOOD, mistakes


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, list[Any]]]:
    for name, field in model.model_fields.items():
        yield from kinds(f"{prefix}{name}", field.annotation, list(field.metadata))


def kinds(path: str, annotation: Any, limits: list[Any]) -> Iterator[tuple[str, Any, list[Any]]]:
    """Every type inside a field's, with the limits on it."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        more = [m for meta in annotation.__metadata__ for m in getattr(meta, "metadata", [meta])]
        yield from kinds(path, inside[0], limits + more)
    elif origin in (Union, types.UnionType):
        for one in inside:
            yield from kinds(path, one, limits)
    elif origin in (tuple, dict):
        yield path, origin, limits
        yield from kinds(f"{path}[]", inside[-1 if origin is dict else 0], [])
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from fields(annotation, f"{path}.")
    else:
        yield path, annotation, limits


def has(limits: list[Any], *names: str) -> bool:
    return any(getattr(limit, name, None) is not None for limit in limits for name in names)


def is_finite(limits: list[Any]) -> bool:
    return has(limits, "le", "lt") or any(getattr(limit, "allow_inf_nan", None) is False for limit in limits)


def test_every_count_every_list_and_every_number_of_the_schema_has_limits() -> None:
    found = list(fields(Config))
    assert len(found) > 130
    counts = [path for path, kind, _ in found if kind is int]
    assert {"loader.workers", "distributed.device_ids[]", "swa.start"} <= set(counts)
    for path, kind, limits in found:
        if kind is int:
            assert has(limits, "ge", "gt"), path
            assert has(limits, "le", "lt"), path
        elif kind is float:
            assert is_finite(limits), path
        elif kind in (tuple, dict):
            assert has(limits, "max_length"), path


@pytest.mark.parametrize("key", [key for key in schema_keys() if "whole number" in accepted_values(key)])
def test_a_count_far_beyond_is_refused_with_the_limit_and_its_reason(key):
    value = "[99999999999999999999]" if "list of" in accepted_values(key) else 10**20 - 1
    message = mistakes(GOOD, ["task=t.py:T", f"{key}={value}"])[key]
    assert "at most " in message or "below " in message
    assert message.endswith(accepted_values(key))
    assert accepted_values(key) != accepted_values(key, reasons=False), "the reason is missing"


@pytest.mark.parametrize(
    "override",
    ["loader.workers=1024", "epochs=1000000000", "checkpoint.keep_last=1000000", "lanes=64", "seed=9223372036854775807",
     "distributed.timeout=31536000", "distributed.timeout=0.1"],
)  # fmt: skip
def test_a_limit_itself_is_accepted(override):
    load_config(GOOD, [override])


@pytest.mark.parametrize("override", ["distributed.timeout=0.01", "distributed.timeout=1e300",
                                      "loss_scale.growth=.inf", "best.min_delta=.inf"])  # fmt: skip
def test_numbers_are_within_reason(override):
    key = override.partition("=")[0]
    assert "but it takes a number" in mistakes(GOOD, [override])[key]


def test_a_list_of_any_length_is_refused():
    values = {**GOOD, "task": "t.py:T", "optimizer": {"groups": [{"match": ["x"]}] * 1001}}
    assert "at most 1000 entries" in mistakes(values)["optimizer.groups"]


def test_more_keys_than_there_are_is_one_mistake():
    found = mistakes({**GOOD, **{f"k{number}": 1 for number in range(3000)}})
    assert "sets 3,003 keys; a config has at most 2,000" in found[""]
