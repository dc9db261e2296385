"""The key of the learning rate, the config of a range test, and its plots."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samestep.bench.tuning.lr_range_test import (
    GroupRates,
    RangeTestResult,
    Target,
    base_rate,
    default_key,
    find_lr,
    range_test_config,
)
from samestep.bench.tuning.lr_report import write_html, write_png
from samestep.bench.tuning.lr_suggestion import Curve, RangeTest, suggest, what_is_wrong
from samestep.config import Config, load_config
from samestep.distributed.context import SingleProcessContext
from samestep.errors import OutputError, RangeTestError
from samestep.train.task import Task


class TakesLr(Task):
    def __init__(self, lr: float = 0.1) -> None: ...


class TakesAnything(Task):
    def __init__(self, **params: Any) -> None: ...


def config(**values: Any) -> Config:
    return load_config({"task": "task.py:Mine", "global_batch": 8, "epochs": 2, **values})


def test_the_key_is_the_optimizers_or_the_tasks() -> None:
    assert default_key(config(optimizer={"name": "sgd"}), TakesLr()) == "optimizer.lr"
    assert default_key(config(), TakesLr()) == "params.lr"
    assert default_key(config(params={"lr": 0.1}), TakesAnything()) == "params.lr"
    assert default_key(config(), TakesAnything()) is None


def test_groups_keep_their_ratios_to_the_base_rate() -> None:
    # Not real optimizers: the first one of a process imports half of torch, for seconds.
    optimizers: list[Any] = [
        SimpleNamespace(param_groups=[{"lr": 0.01}, {"lr": 0.0}]),
        SimpleNamespace(param_groups=[{"lr": 0.3}]),
    ]
    rates = GroupRates(optimizers, base=0.1)
    for base in (5.0, 0.2):
        rates.set(base)
        set_to = [group["lr"] for one in optimizers for group in one.param_groups]
        assert set_to == pytest.approx([0.1 * base, 0.0, 3 * base])


def test_the_base_rate_is_the_present_value_of_its_key() -> None:
    groups: list[Any] = [SimpleNamespace(param_groups=[{"lr": 0.01}, {"lr": 0.5}])]
    named = config(optimizer={"lr": 0.2}, params={"lr": 0.3, "rate": "fast"})
    assert base_rate(named, TakesLr(), "optimizer.lr", groups) == 0.2
    assert base_rate(named, TakesLr(), "params.lr", groups) == 0.3
    assert base_rate(config(), TakesLr(), "params.lr", groups) == 0.1, "the task's default"
    assert base_rate(named, TakesAnything(), "params.rate", groups) == 0.01, "the first group's"
    assert base_rate(config(), TakesAnything(), None, groups) == 0.01
    with pytest.raises(RangeTestError, match=r"params.lr has a learning rate of 0: set one above"):
        base_rate(config(params={"lr": 0}), TakesLr(), "params.lr", groups)


def test_the_test_is_a_separate_short_run() -> None:
    given = config(run_dir="there", ema={}, schedule={}, early_stopping={"patience": 1})
    own = range_test_config(given, 50)
    assert own.run_path == Path("there/tune-lr")
    assert (own.steps, own.epochs, own.checkpoint.enabled) == (50, None, False)
    assert (own.ema, own.schedule, own.early_stopping) == (None, None, None)
    assert own.speed.graph is False
    assert (own.task, own.seed, own.global_batch) == (given.task, given.seed, given.global_batch)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (None, "Mine takes no lr. Give the key as --key params.NAME"),
        ("params.lr", "--key is params.lr, but Mine takes no lr"),
        ("optimzer.lr", "optimzer is not a key of this config: did you mean optimizer?"),
        ("params.width.lr", "--key is params.width.lr, but params.width is 3, which has no keys"),
    ],
)
def test_mistakes_are_reported_before_the_first_step(tmp_path: Path, key: str | None, words: str) -> None:
    (tmp_path / "own_task.py").write_text(
        "from samestep import Task\n\nclass Mine(Task):\n    def __init__(self, width): ...\n"
    )
    file = tmp_path / "config.yaml"
    file.write_text(
        f"task: own_task.py:Mine\nparams: {{width: 3}}\nglobal_batch: 8\nsteps: 5\nrun_dir: {tmp_path}/run\n"
    )
    path = list(sys.path)
    try:
        with pytest.raises(RangeTestError, match=re.escape(words)):
            find_lr(load_config(file), SingleProcessContext(), RangeTest(), key, Target(file))
    finally:
        sys.path[:] = path
        del sys.modules["own_task"]


def found(loss_at_last: float = 3.0) -> RangeTestResult:
    curve = Curve(RangeTest(steps=60, smooth=0.5))
    for step in range(60):
        curve.add(2.5 - step / 30 if step < 45 else loss_at_last + step)
    wrong = what_is_wrong(curve)
    return RangeTestResult(curve, {} if wrong else suggest(curve), wrong, "params.lr", 1e-4, Path("run"))


def test_the_picture_is_a_png_of_some_size(tmp_path: Path) -> None:
    write_png(found(), "mine", tmp_path / "new" / "lr.png")
    data = (tmp_path / "new" / "lr.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (1408, 631)


def test_the_page_shows_the_suggestions_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    result = found()
    write_html(result, "a <b> run", tmp_path / "new" / "lr.html")
    text = (tmp_path / "new" / "lr.html").read_text(encoding="utf-8")
    assert "<h1>a &lt;b&gt; run</h1>" in text
    for rule, rate in result.suggestions.items():
        assert f'<td>{rule}</td><td class="number">{rate:.3g}</td>' in text
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*\s(?:src|href)=", text)
    assert '"xlog": true' in text
    assert "learning rate (params.lr)" in text


def test_the_page_of_a_test_without_suggestions_shows_why(tmp_path: Path) -> None:
    curve = Curve(RangeTest())
    curve.stop("the loss is NaN or infinite")
    wrong = what_is_wrong(curve)
    nothing = RangeTestResult(curve, {}, wrong, None, 0.1, Path("run"))
    write_html(nothing, "mine", tmp_path / "lr.html")
    write_png(nothing, "mine", tmp_path / "lr.png")
    text = (tmp_path / "lr.html").read_text(encoding="utf-8")
    assert "No suggestion: the loss is NaN or infinite after 0 steps" in text
    assert "0 of 100 steps" in text


def test_every_value_of_the_page_is_escaped(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    good = found()
    good.curve.stopped = bad
    given = replace(good, key=f"params.{bad}", suggestions={"valley": good.curve.rates[0]})
    for page in (given, replace(given, wrong=bad, suggestions={})):
        write_html(page, f"{bad} & co", tmp_path / "lr.html")
        text = (tmp_path / "lr.html").read_text(encoding="utf-8")
        assert "alert(1)" in text
        assert "<script>alert" not in text


def test_a_page_replaces_pages_of_ours_only(tmp_path: Path) -> None:
    write_html(found(), "mine", tmp_path / "lr.html")
    write_html(found(), "again", tmp_path / "lr.html")
    assert "<title>again" in (tmp_path / "lr.html").read_text(encoding="utf-8")
    (tmp_path / "theirs.html").write_text("<html>mine</html>")
    with pytest.raises(OutputError, match="is no page of samestep"):
        write_html(found(), "mine", tmp_path / "theirs.html")
    assert (tmp_path / "theirs.html").read_text() == "<html>mine</html>"
    with pytest.raises(OutputError, match="cannot be written"):
        write_html(found(), "mine", tmp_path)
