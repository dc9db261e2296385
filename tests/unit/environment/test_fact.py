"""A value that carries its reason."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from samestep.environment.fact import Fact


def test_facts_are_the_same_by_value_and_reason() -> None:
    assert Fact(4, "by Slurm") == Fact(4, "by Slurm")
    assert Fact(4, "by Slurm") != Fact(4, "by the container")
    assert Fact(4, "by Slurm") != Fact(5, "by Slurm")


def test_a_fact_cannot_lose_its_reason() -> None:
    with pytest.raises(FrozenInstanceError):
        Fact(4, "by Slurm").value = 5  # type: ignore[misc]
