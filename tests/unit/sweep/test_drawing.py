"""What a trial gets, and whether it is pruned: a function of seed, number and stated results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

from samestep.sweep.optuna_parts import decide, distributions, draw, trial_count
from samestep.sweep.schema import SweepConfig
from samestep.sweep.space import parse_space
from samestep.sweep.storage import Storage

SPACE = {
    "optimizer.lr": {"loguniform": [1e-5, 1e-1]},
    "params.layers": {"int": [1, 8]},
    "params.betas": {"choice": [[0.9, 0.99], [0.8, 0.9]]},
}


def sweep(space: Any = SPACE, **values: Any) -> SweepConfig:
    made = SweepConfig(base="b.yaml", space=space, objective={"metric": "f1", "mode": "max"}, **values)
    made._space, wrong = parse_space(space)
    assert not wrong
    return made


def results(made: SweepConfig, count: int) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for number in range(count):
        values, _ = draw(made, number, found)
        params = {**values, "params.betas": str(values["params.betas"])}
        found[number] = optuna.trial.create_trial(
            params=params, distributions=distributions(made.domains), value=values["optimizer.lr"],
            intermediate_values={1: float(number), 2: float(number)},
        )  # fmt: skip
    return found


@pytest.mark.parametrize("sampler", ["tpe", "random", "nsga2", "optuna.samplers:NSGAIISampler"])
def test_draws_do_not_depend_on_who_draws_and_never_repeat(sampler: str) -> None:
    made = sweep(sampler=sampler)
    known = results(made, 12)
    again = results(made, 12)
    assert [known[n].params for n in known] == [again[n].params for n in again]
    first = draw(made, 12, known)[0]
    assert draw(made, 12, known)[0] == first, "as a resumed sweep would"
    assert len({t.params["optimizer.lr"] for t in known.values()} | {first["optimizer.lr"]}) == 13
    assert first["params.betas"] in SPACE["params.betas"]["choice"]
    assert draw(sweep(sampler=sampler, seed=1), 0, {})[0] != draw(made, 0, {})[0]


def test_results_guide_the_draws() -> None:
    made = sweep(sampler_args={"n_startup_trials": 3})
    known = results(made, 8)
    assert draw(made, 8, known)[0] != draw(made, 8, {})[0]


def test_a_grid_has_every_point_once() -> None:
    made = sweep({"a": {"choice": [1, [2]]}, "b": {"int": [3, 5]}, "c": {"uniform": [0, 1], "step": 0.5}},
                 sampler="grid", trials=100)  # fmt: skip
    points = [draw(made, number, {})[0] for number in range(trial_count(made))]
    assert len(points) == 2 * 3 * 3
    assert len({str(point) for point in points}) == 18
    assert trial_count(sweep(trials=7)) == 7


def test_a_trial_is_pruned_against_the_known_ones_only() -> None:
    made = sweep(pruner="median", pruner_args={"n_startup_trials": 2})
    known = results(made, 6)  # which report 0 to 5
    values = draw(made, 6, known)[0]
    assert decide(made, 6, values, [(1, 1.0)], known)[0]
    assert not decide(made, 6, values, [(1, 4.0)], known)[0]
    few = {0: known[0], 1: known[1]}
    assert not decide(made, 6, values, [(1, 1.0)], few)[0]
    assert not decide(sweep(), 6, values, [(1, -9.0)], known)[0]


def test_hyperband_and_patience_take_part() -> None:
    patient = sweep(pruner="patient", pruner_args={"patience": 1})
    values = draw(patient, 0, {})[0]
    falling = [(1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0)]
    assert decide(patient, 0, values, falling, {})[0]
    band = sweep(pruner="hyperband", pruner_args={"max_resource": 9})
    notes = decide(band, 3, values, [(1, 0.1), (2, 0.2), (3, 0.3)], results(band, 3))[1]
    assert any("rung" in name for name in notes), notes


def test_a_trial_that_was_written_and_not_begun_runs(tmp_path: Path) -> None:
    made = sweep()
    storage = Storage(made, tmp_path)
    values = draw(made, 0, {})[0]
    # As a process leaves it that was killed in between.
    params = {**values, "params.betas": str(values["params.betas"])}
    storage._study.enqueue_trial(params, user_attrs={"values": values})
    storage.start_waiting()
    assert [(t.state, t.values) for t in storage.trials()] == [("running", values)]
    assert storage.begin(values, {}) == 1
    storage.close()
