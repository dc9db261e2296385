"""How trials are packed on a machine's GPUs or CPUs."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.config import Config
from samestep.environment.fact import Fact
from samestep.environment.hardware import Hardware
from samestep.errors import LaunchError
from samestep.launch.commands import torchrun as torchrun_module
from samestep.sweep import placing as packing_module
from samestep.sweep.placing import ResourcePlan, pack
from samestep.sweep.schema import SweepConfig


def machine(gpus: int = 0, cpus: int = 8) -> Hardware:
    return Hardware(
        gpus, ("GPU",) * gpus, Fact(cpus, "CPUs this process may run on"), ("gloo",), "here",
        Fact("local", ""), Fact(gpus > 0, ""),
    )  # fmt: skip


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def packed(
        here: Hardware, trials: int = 20, variables: dict[str, str] | None = None, **values: Any
    ) -> ResourcePlan:
        monkeypatch.setattr(packing_module, "quick_hardware", lambda environ: here)
        monkeypatch.setattr(packing_module, "expects_gpu", lambda environ: here.device_count > 0)
        monkeypatch.setattr(torchrun_module, "owned_cpus", lambda environ: here.cpus)
        base = values.pop("base", {})
        config = Config.model_validate({"task": "task.py:Mine", "global_batch": 64, "epochs": 2, **base})
        sweep = SweepConfig.model_validate(
            {"base": "b.yaml", "space": {}, "objective": {"metric": "x"}, "round": 4, **values}
        )
        return pack(sweep, config, trials, variables or {})

    return packed


def test_as_many_trials_run_side_by_side_as_have_cpus_and_something_to_do(packed: Any) -> None:
    found = packed(machine(cpus=8), round=16)
    assert (found.parallel, found.ranks, found.threads) == (8, 1, 1)
    assert not any(place.gpus for place in found.places)
    assert found.summary.endswith("whatever the machine has): 8 of 8 CPUs")
    assert packed(machine(cpus=8)).parallel == 4, "a round waits for the one before"
    assert packed(machine(cpus=8), deterministic=False).parallel == 8
    assert packed(machine(cpus=8), trials=3).parallel == 3
    assert packed(machine(cpus=8), ranks_per_trial=3).parallel == 2
    assert packed(machine(cpus=8), base={"distributed": {"threads_per_rank": 4}}).parallel == 2
    assert packed(machine(cpus=8), base={"same": "rounding"}).parallel == 1, "it takes all CPUs"
    assert packed(machine(cpus=1), ranks_per_trial=2).parallel == 1
    whole = packed(machine(cpus=8), ranks_per_trial="all", base={"lanes": 4})
    assert (whole.ranks, whole.parallel) == (4, 2), "all that have lanes"


def test_gpus_are_shared_out_and_more_than_there_are_is_refused(packed: Any) -> None:
    found = packed(machine(gpus=4, cpus=16))
    assert (found.parallel, found.threads) == (4, 16)
    assert [place.gpus for place in found.places] == [("0",), ("1",), ("2",), ("3",)]
    assert "on 4 of 4 GPUs: 64 threads on 16 CPUs" in found.summary
    assert "threads_per_rank: 4 in the base, or a lower parallel" in found.summary
    named = {"CUDA_VISIBLE_DEVICES": "0,1,4,5"}
    pairs = packed(machine(gpus=4), variables=named, ranks_per_trial=2)
    assert pairs.places[1].gpus == ("4", "5")
    alone = packed(machine(gpus=4), ranks_per_trial="all")
    assert (alone.parallel, alone.ranks, alone.places[0].gpus) == (1, 4, ()), "it has all of them"
    on_cpus = packed(machine(gpus=4), base={"distributed": {"device": "cpu"}})
    assert not any(place.gpus for place in on_cpus.places)
    with pytest.raises(LaunchError, match="there are 4 GPUs: set parallel: 2, or ranks_per_trial: 1"):
        packed(machine(gpus=4), parallel=3, ranks_per_trial=2)


def test_more_threads_than_cpus_are_reported_with_numbers(packed: Any) -> None:
    found = packed(machine(cpus=2), parallel=2, ranks_per_trial=2)
    assert "4 threads on 2 CPUs (CPUs this process may run on)" in found.summary
    assert found.parallel == 2, "a person has set it"
