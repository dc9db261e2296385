"""What the evaluation section refuses, and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.config import load_config
from samestep.config.evaluation import RETRIEVAL_METRICS, at_k
from samestep.errors import ConfigError

BEST = {"metric": "precision_at_1", "mode": "max"}


def loaded(evaluation: dict[str, Any], best: dict[str, Any]) -> Any:
    given = {"task": "t.py:T", "global_batch": 8, "epochs": 1, "best": best}
    return load_config({**given, "evaluation": evaluation})


def test_retrieval_and_what_it_measures() -> None:
    config = loaded({"mode": "retrieval"}, BEST).evaluation
    assert config.retrieval_metrics == RETRIEVAL_METRICS
    assert (config.reference, config.views, config.distance) == ("train", None, "cosine")
    chosen = loaded({"mode": "retrieval", "metrics": ["recall_at_10", "ami"]}, BEST).evaluation
    assert chosen.retrieval_metrics == ("recall_at_10", "ami")
    assert loaded({"mode": "retrieval"}, {"metric": "ema_r_precision", "mode": "max"})
    assert (at_k("recall_at_10"), at_k("r_precision")) == (("recall", 10), None)


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "metric": ({"metrics": ["precision"]}, BEST, "precision cannot be measured: there are precision_at_1"),
    "no metric": ({"metrics": []}, BEST, "it is empty: name at least one"),
    "twice": ({"views": ["a", "a"]}, BEST, "a name is there twice"),
    "no view": ({"views": []}, BEST, "evaluation.views"),
    "space": ({"views": ["my head"]}, BEST, "evaluation.views"),
    "loss": ({}, {}, "measures no loss: set best: {metric: precision_at_1, mode: max}"),
    "lower": ({}, {"metric": "head/r_precision"}, "best.mode: higher is better for r_precision"),
    "sharded": ({"mode": "sharded", "views": ["a"]}, {}, "is for mode: retrieval, and the mode is sharded"),
    "gather": ({"mode": "gather", "metrics": ["nmi"]}, {}, "is for mode: retrieval, and the mode is gather"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes(kind: str) -> None:
    evaluation, best, message = MISTAKES[kind]
    with pytest.raises(ConfigError) as caught:
        loaded({"mode": "retrieval", **evaluation}, best)
    assert message in str(caught.value)
