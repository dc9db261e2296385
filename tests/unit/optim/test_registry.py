"""Classes and arguments by the names that a config gives them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from samestep.config.names import argument_mistakes, arguments_of, classes_of, closest, with_tuples


class Base:
    pass


class Zebra(Base):
    pass


class Ant(Base):
    pass


class _Hidden(Base):
    pass


def test_classes_are_found_by_small_letters_in_order() -> None:
    module = ModuleType("animals")
    for item in (Base, Zebra, Ant, _Hidden, ModuleType):
        setattr(module, item.__name__, item)
    module.number = 3  # type: ignore[attr-defined]
    assert list(classes_of(module, Base).items()) == [("ant", Ant), ("zebra", Zebra)]


def takes(params: Any, lr: float, *rest: int, momentum: float = 0.9, **more: int) -> None:
    pass


def test_only_arguments_that_have_a_name_can_be_given() -> None:
    assert list(arguments_of(takes, without=["params"])) == ["lr", "momentum"]


def test_what_takes_no_arguments_is_described_as_such() -> None:
    [found] = argument_mistakes("o", "plain", {}, {"lr": 1})
    assert str(found) == "o.lr: plain does not take it: it takes none"


def test_lists_become_tuples_at_any_depth() -> None:
    assert with_tuples({"betas": [0.9, [1, 2]], "x": "ab"}) == {"betas": (0.9, (1, 2)), "x": "ab"}


def test_the_closest_names_come_first() -> None:
    names = ["sgd", "adam", "adamw", "rmsprop"]
    assert closest("adamww", names) == "adamw, adam"
    assert closest("xyz", names, shown=2) == "sgd, adam", "any, if none is close"
