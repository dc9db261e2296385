"""Which tensor of two traces is named."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest
import torch

from samestep.train.trace import AFTER, BEFORE, LANE, SUM, Entry
from samestep.verify.suspect import Suspect, find_suspect

LABELS = ("1 rank", "2 ranks")


def entry(part: int, lane: int | None, order: int, kind: str, name: str, value: float = 1.0, step: int = 0) -> Entry:
    data = torch.tensor([value, 2.0])
    elements = base64.b64encode(data.view(torch.uint8).numpy().tobytes()).decode()
    return Entry(step, part, lane, order, kind, name, 0, f"{value}", "float32", elements)


def lane(number: int, **values: float) -> list[Entry]:
    """The entries of one lane; a value that is given differs."""
    kinds = ("samples", "batch", "input", "output", "loss", "buffer", "gradient")
    return [entry(LANE, number, order, kind, "m", values.get(kind, 1.0)) for order, kind in enumerate(kinds)]


def rest(gradient: float = 1.0, before: float = 1.0, after: float = 1.0) -> list[Entry]:
    return [
        entry(BEFORE, None, 0, "state", "model.w", before),
        entry(SUM, None, 0, "gradient", "m", gradient),
        entry(AFTER, None, 0, "state", "model.w", after),
    ]


def found(one: list[Entry], *ranks: list[Entry]) -> Suspect:
    suspect = find_suspect(LABELS, [one], ranks)
    assert suspect is not None
    return suspect


ONE = [*lane(0), *lane(1), *rest()]


def test_equal_traces_have_no_suspect() -> None:
    assert find_suspect(LABELS, [ONE], [[*lane(0), *rest()], [*lane(1), *rest()]]) is None


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"output": 3.0, "loss": 3.0, "gradient": 3.0}, "output"),
        ({"gradient": 3.0, "buffer": 3.0}, "buffer"),
        ({"samples": 3.0, "input": 3.0}, "samples"),
    ],
)
def test_the_first_in_the_order_of_a_lane_is_named(changes: dict[str, float], kind: str) -> None:
    suspect = found(ONE, [*lane(0), *rest(gradient=3.0)], [*lane(1, **changes), *rest(3.0)])
    assert (suspect.step, suspect.lane, suspect.kind, suspect.name) == (0, 1, kind, "m")
    assert suspect.between == "1 rank: rank 0; 2 ranks: rank 1"


def test_a_state_that_differs_before_the_step_comes_first() -> None:
    suspect = found(ONE, [*lane(0, output=3.0), *lane(1), *rest(before=3.0)])
    assert (suspect.lane, suspect.tensor) == (None, "model.w before the step")
    assert "a checkpoint does not hold all" in suspect.reason


def test_sums_and_updates_come_after_all_lanes() -> None:
    suspect = found(ONE, [*lane(0), *lane(1), *rest(gradient=3.0, after=3.0)])
    assert suspect.tensor == "gradient m of all lanes"
    suspect = found(ONE, [*lane(0), *lane(1), *rest(after=3.0)])
    assert suspect.tensor == "model.w after the update"


def test_ranks_of_one_run_are_compared_with_each_other() -> None:
    suspect = found(ONE, [*lane(0), *rest()], [*lane(1), *rest(after=3.0)])
    assert suspect.between == "2 ranks: ranks 0 and 1"
    assert str(suspect).startswith("first difference: step 0, model.w after the update: ")


def test_what_only_rank_0_holds_is_no_difference() -> None:
    ema = entry(AFTER, None, 1, "state", "kept.ema")
    assert find_suspect(LABELS, [[*ONE, ema]], [[*lane(0), *rest(), ema], [*lane(1), *rest()]]) is None


def test_a_tensor_that_one_run_does_not_compute_is_named() -> None:
    suspect = found(ONE, [*lane(0), *lane(1)[:3], *rest()])
    assert suspect.tensor == "output of m (order 3), which only one of them computes"
    assert suspect.ulp is None


def test_an_earlier_step_comes_first() -> None:
    late = [replace(item, step=1) for item in [*lane(0, output=3.0), *rest()]]
    suspect = found([*ONE, *late], [*lane(0), *lane(1), *rest(after=3.0), *late])
    assert (suspect.step, suspect.kind) == (0, "state")


def test_the_distance_is_that_of_the_kept_elements() -> None:
    value = float(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))
    suspect = found(ONE, [*lane(0, output=value), *lane(1), *rest()])
    assert suspect.ulp == 1
    elsewhere = [replace(item, digest="other") if item.kind == "output" else item for item in ONE]
    assert found(ONE, elsewhere).ulp is None, "the difference is not among them"
