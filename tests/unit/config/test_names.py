"""Optimizers, schedules and tasks that a config names are there: known when it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samestep.config import load_config, read_config
from samestep.errors import ConfigError
from tests.unit.config.configs import GOOD, mistakes


@pytest.mark.parametrize(
    ("section", "values", "path", "message"),
    [
        ("optimizer", {"name": "adamm"}, "optimizer.name", "there is no optimizer 'adamm': there are Adadelta, "),
        ("optimizer", {"name": "lbfgs"}, "optimizer.name", "LBFGS cannot be used here"),
        ("optimizer", {"args": {"betta": 1}}, "optimizer.args.betta", "AdamW does not take it: it takes betas, eps"),
        ("optimizer", {"args": {"lr": 1}}, "optimizer.args.lr", "AdamW does not take it"),
        ("optimizer", {"groups": [{"match": ["x"], "name": "zzz"}]}, "optimizer.groups[0].name", "no optimizer 'zzz'"),
        ("optimizer", {"groups": [{"match": ["x"], "args": {"y": 1}}]}, "optimizer.groups[0].args.y", "does not take it"),
        ("schedule", {"name": "cosin"}, "schedule.name", "there is no schedule 'cosin': there are constant, linear"),
        ("schedule", {"name": "lambdalr"}, "schedule.name", "there is no schedule 'lambdalr'"),
        ("schedule", {"name": "one_cycle", "warmup": 10}, "schedule.warmup", "one_cycle rises by itself"),
        ("schedule", {"name": "onecyclelr", "warmup": 0.1, "args": {"max_lr": 1}}, "schedule.warmup", "rises by itself"),
        ("schedule", {"name": "step"}, "schedule.args.step_size", "step cannot do without it"),
        ("schedule", {"name": "steplr", "args": {"x": 1, "step_size": 2}}, "schedule.args.x", "does not take it"),
        ("schedule", {"name": "steplr", "args": {"step_size": 2}, "final": 0.5}, "schedule.final", "does not take it"),
        ("schedule", {"name": "warm_restarts", "args": {"T_O": 3}}, "schedule.args.T_O", "it takes T_0, T_mult"),
        ("schedule", {"name": "plateau", "args": {"mode": "max"}}, "schedule.args.mode", "it takes factor"),
        ("schedule", {"name": "step", "final": 0.1, "args": {"step_size": 1}}, "schedule.final", "linear, cosine"),
        ("schedule", {"name": "plateau", "every": "step"}, "schedule.every", "moves on with every evaluation"),
    ],
)  # fmt: skip
def test_what_torch_does_not_have_is_a_mistake_of_the_config(
    section: str, values: dict[str, Any], path: str, message: str
) -> None:
    found = mistakes({**GOOD, section: values})
    assert message in found[path]


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("optimizer", {"name": "SGD", "args": {"momentum": 0.9}, "groups": [{"match": ["x"], "name": "adam"}]}),
        ("schedule", {"name": "cosine", "warmup": 10, "final": 0.1}),
        ("schedule", {"name": "CosineAnnealingLR", "args": {"T_max": 3}}),
        ("schedule", {"name": "plateau", "args": {"patience": 2}}),
    ],
)
def test_what_it_has_is_not(section: str, values: dict[str, Any]) -> None:
    load_config({**GOOD, section: values})


def check(folder: Path, source: str | bytes | None, name: str = "task.py:T") -> str:
    """What `config check` says of a task."""
    if source is not None:
        (folder / "task.py").write_bytes(source if isinstance(source, bytes) else source.encode())
    config = folder / "c.yaml"
    config.write_text(f"global_batch: 8\nepochs: 1\ntask: {name}\n")
    load_config(config)  # on a machine that only launches, the file may be elsewhere
    try:
        read_config(config, look=True)
    except ConfigError as error:
        return str(error)
    return "valid"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "task.py cannot be read: No such file"),
        ("class Other: ...", "task.py defines no class T; it has Other"),
        ("", "it has none"),
        ("def f():\n    class T: ...", "defines no class T"),
        ("class T(\n", "is not Python: '(' was never closed, on line 1"),
        ("(" * 100_000, "is not Python"),
        ("x = " + "-" * 200_000 + "1", "is not Python"),
        (b"\x00", "is not Python"),
        (b"\xff\xfe", "is not Python"),
    ],
)
def test_a_task_that_is_not_there_is_a_mistake(tmp_path, source, message):
    assert message in check(tmp_path, source)


@pytest.mark.parametrize(
    "source",
    ["class T: ...", "from other import T", "from other import X as T", "T = make()", "raise SystemExit\nclass T: ...",
     "if 1:\n    class T: ...", "try:\n    from a import T\nexcept ImportError:\n    T = None", "from other import *",
     "globals()['T'] = 1", "def __getattr__(name): ...", b"# coding: latin-1\nclass T: '\xe9'"],
)  # fmt: skip
def test_a_task_that_is_there_is_not_run(tmp_path, source):
    assert check(tmp_path, source) == "valid"


def test_a_task_of_a_name_that_nothing_has_is_a_mistake(tmp_path):
    assert "cannot be read: File name too long" in check(tmp_path, None, "x" * 300 + ".py:T")
    assert "names no class" in mistakes({**GOOD, "task": "task.py"})["task"]
