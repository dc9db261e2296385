"""What is tried, and what is written."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.bench.tuning.variants import BASE, Layout, as_text, batches, from_text, layouts, variants
from samestep.config import Config, load_config
from samestep.errors import PlanError, TextError


def config(**values: Any) -> Config:
    return load_config({"task": "task.py:MyTask", "global_batch": 64, "epochs": 1, **values})


def test_all_cores_are_used_by_threads_by_ranks_and_between() -> None:
    assert layouts(config(), 4, 0, quick=False) == [Layout(1, 1), Layout(1, 4), Layout(2, 2), Layout(4, 1)]
    assert layouts(config(), 4, 0, quick=True) == [Layout(1, 1), Layout(1, 4), Layout(4, 1)]
    assert layouts(config(lanes=2), 4, 0, quick=False)[-1] == Layout(2, 2), "a rank needs a lane"
    assert layouts(config(), 1, 0, quick=False) == [Layout(1, 1)]
    assert layouts(config(), 3, 0, quick=False)[-1] == Layout(2, 1), "64 samples on 3 ranks"


def test_gpus_have_a_rank_each() -> None:
    assert layouts(config(), 64, 2, quick=False) == [Layout(1, None), Layout(2, None)]


def test_a_batch_that_grows_with_ranks_is_refused() -> None:
    growing = load_config({"task": "task.py:MyTask", "batch_per_rank": 8, "epochs": 1})
    with pytest.raises(PlanError, match="has no global_batch"):
        layouts(growing, 4, 0, quick=False)


def test_other_values_are_tried_and_the_configs_own_are_the_base() -> None:
    found = [one.label for one in variants(config(), 2, 2, on_gpu=False, quick=False)]
    assert found == [BASE, "2 lanes", "4 lanes", "16 lanes", "1 worker", "2 workers", "bf16"]
    quick = variants(config(precision="bf16", loader={"workers": 1}), 1, 2, on_gpu=True, quick=True)
    assert [one.label for one in quick] == [BASE, "1 lane", "16 lanes", "0 workers", "fp32", "without graphs"]
    assert [one.label for one in batches(config(), quick=False)] == ["global batch 128", "global batch 256"]


def test_variants_reach_the_ranks() -> None:
    tried = variants(config(), 1, 2, on_gpu=False, quick=True)
    assert from_text(as_text(tried)) == tried
    for text in ("", "{}", "[1]", '[{"label": "a"}]'):
        if text == "{}":
            assert from_text(text) == []
            continue
        with pytest.raises(TextError):
            from_text(text)
