"""Any text as a sweep's file: a sweep, or one kind of error that is a message."""

from __future__ import annotations

from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from samestep.errors import ConfigError
from samestep.sweep.loading import load_sweep
from samestep.sweep.optuna_parts import distributions, draw, trial_count
from samestep.sweep.schema import SweepConfig
from tests.fuzz.property import cases, check_message, soon
from tests.fuzz.texts import values

BASE = "task: task.py:Mine\nglobal_batch: 64\nepochs: 2\n"
GOOD = "base: config.yaml\nspace: {params.x: {uniform: [0, 1]}}\nobjective: {metric: a}\nsampler: random\n"
KEYS = (
    *SweepConfig.model_fields, "zzz",
    "space.params.x", "space.optimizer.lr", "objective.mode", "folds.k", "objective.goal",
)  # fmt: skip
domains = st.sampled_from(["uniform", "loguniform", "int", "logint", "choice", "type", "step", "x"])


@cases(30)
@given(st.lists(st.tuples(st.sampled_from(KEYS), values), max_size=3), domains, values)
@example([("space", "{params.x: {type: [a], min: 1}}")], "int", "[1, 2]")
@example([("objective.goal", "[a]")], "choice", "[[1], {a: b}]")
@example([("sampler", "grid")], "int", "[0, 1000000000000]")
@example([("sampler", "grid")], "int", "[[0], 1]")
@example([("{1: 2}", "3")], "choice", "[null, .nan, .nan]")
def test_any_text_is_a_sweep_or_a_config_error(
    tmp_path: Path, changes: list[tuple[str, str]], kind: str, bounds: str
) -> None:
    (tmp_path / "config.yaml").write_text(BASE)
    path = tmp_path / "sweep.yaml"
    text = GOOD.replace("uniform: [0, 1]", f"{kind}: {bounds}")
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with soon():
        try:
            sweep = load_sweep(path, [f"{key}={value}" for key, value in changes]).sweep
        except ConfigError as error:
            check_message(error)
            return
        distributions(sweep.domains)
        if trial_count(sweep):
            draw(sweep, 0, {})
