"""Which metrics are drawn."""

from __future__ import annotations

import pytest

from samestep.errors import RunDirError
from samestep.report.curves.panels import base, choose, title
from tests.unit.report.runs import history

ONE = [1.0]
NAMES = ("epoch", "lr[0]", "lr[1]", "loss", "time_data", "val_loss", "loss/a", "loss_scale")
RUNS = [history(**dict.fromkeys(NAMES, ONE)), history("other", accuracy=ONE)]


def test_what_a_person_follows_comes_in_that_order() -> None:
    assert choose(RUNS, []) == ["loss", "loss/a", "val_loss", "accuracy", "lr[0]", "lr[1]", "loss_scale"]


def test_anything_can_be_chosen_by_its_name_also_with_wildcards() -> None:
    assert choose(RUNS, ["time_data", "lr", "*loss"]) == ["time_data", "lr[0]", "lr[1]", "loss", "val_loss"]
    assert choose(RUNS, ["lr[1]"]) == ["lr[1]"]


def test_an_unknown_metric_is_refused_with_those_there_are() -> None:
    with pytest.raises(RunDirError, match=r"no run has a metric 'f1': there are epoch, lr\[0\],"):
        choose(RUNS, ["loss", "f1"])


def test_runs_without_numbers_are_refused() -> None:
    with pytest.raises(RunDirError, match="mine: no numbers yet"):
        choose([history()], [])


def test_a_run_of_nothing_but_bookkeeping_shows_that() -> None:
    assert choose([history(epoch=ONE)], []) == ["epoch"]


def test_names_for_people() -> None:
    assert [base("lr[12]"), base("a[b]"), title("lr"), title("f1")] == ["lr", "a[b]", "learning rate", "f1"]
