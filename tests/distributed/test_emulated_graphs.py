"""Steps that are replayed, by an emulated graph on a CPU: the bits of eager steps at any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.idioms import BUFFERS
from tests.distributed.running import Recorded, assert_same, settings, train, train_rank
from tests.ranks import run_ranks
from tests.variations import variations

IDIOMS = Path(__file__).with_name("idioms.py")
FOLLOWERS = IDIOMS.parents[1] / "sameness" / "models" / "followers.py"
# Evaluations take half of such a run, and one case that has them between replayed steps will do.
UNEVALUATED: dict[str, Any] = {"evaluation": {"every_epochs": None}}
CASES: dict[str, dict[str, Any]] = {
    "everything": {"clip": {"norm": 0.5}},
    "one lane": {"lanes": 1, "clip": {"norm": 0.5}, **UNEVALUATED},
    "five lanes": {"lanes": 5, "global_batch": 30, **UNEVALUATED},
    "skipping": {"on_nonfinite": "skip", "clip": {"adaptive": 0.9}, **UNEVALUATED},
    "fp16": {"precision": "fp16", "loss_scale": {"interval": 3}, **UNEVALUATED},
    "two optimizers": {"task": "TwoOptimizers", **UNEVALUATED},
    "named losses": {"task": f"{IDIOMS}:NamedAlike", "loss_weights": {"fit": 1.0, "size": 0.5}, **UNEVALUATED},
}


def _train(config: dict[str, Any], record: str, why_no_update: str | None) -> None:
    from tests.emulated_graphs import emulated_graphs

    with emulated_graphs(why_no_update):
        train_rank(config, record)


def replayed(folder: Path, world: int, why_no_update: str | None = None, **values: Any) -> Recorded:
    folder = folder / f"replayed-{world}{'' if why_no_update is None else '-eager'}"
    config = settings(values.pop("task", "Everything"), folder, **values)
    run_ranks(_train, world, config, str(folder / "record"), why_no_update)
    said = (folder / "logs" / "rank-0.log").read_text()
    assert "steps are replayed from here on" in said, said
    # On a CPU no optimizer reads there whether a step counts.
    waits = values.get("precision") == "fp16" or values.get("on_nonfinite") == "skip"
    eager_update = why_no_update is not None or waits or "distributed" in values
    assert ("the update runs without a graph" in said) is eager_update, said
    return Recorded(folder)


@pytest.mark.parametrize("case", variations(CASES, kept=["everything"]))
def test_replayed_steps_are_one_run_with_eager_ones(case: str, tmp_path: Path) -> None:
    values = {"epochs": 5, **CASES[case]}
    runs = [train(tmp_path, 1, **values)]
    worlds = (1,) if case == "one lane" else (1, 2, 4)
    runs += [replayed(tmp_path, world, **values) for world in worlds]
    assert_same(runs)


@pytest.mark.parametrize("case", variations(["everything", "fp16"], kept=["everything"]))
def test_replayed_steps_whose_sums_have_owners_are_one_run_with_eager_ones(case: str, tmp_path: Path) -> None:
    values = {"epochs": 5, **CASES[case]}
    owned = {"device": "cpu", "threads_per_rank": 1, "shard": "optimizer"}
    runs = [replayed(tmp_path, world, distributed=owned, **values) for world in (2, 4)]
    assert_same([train(tmp_path, 1, **values), *runs])


def _loop(folder: str, name: str, emulated: bool, shard: str = "none") -> tuple[str, list[float]]:
    from contextlib import nullcontext

    from tests.distributed.test_loader_loops import train_body
    from tests.emulated_graphs import emulated_graphs

    owned = {"device": "cpu", "threads_per_rank": 1, "shard": shard}
    with emulated_graphs() if emulated else nullcontext():
        return train_body(folder, name, epochs=4, distributed=owned)


@pytest.mark.variation("test_replayed_steps_are_one_run_with_eager_ones: of a loop")
@pytest.mark.parametrize(
    ("name", "worlds", "shard"),
    variations(
        [("convolutions", (1, 2, 4), "none"), ("diffusion", (1, 2, 4), "none"), ("scaled", (1, 2, 4), "none"),
         ("convolutions", (4,), "optimizer")],
        kept=[("convolutions", (1, 2, 4), "none")],
    ),
)  # fmt: skip
def test_a_loops_body_is_replayed_with_the_bits_of_an_eager_one(
    name: str, worlds: tuple[int, ...], shard: str, tmp_path: Path
) -> None:
    [expected] = run_ranks(_loop, 1, str(tmp_path / "eager"), name, False)
    for world in worlds:
        folder = tmp_path / str(world)
        assert run_ranks(_loop, world, str(folder), name, True, shard) == [expected] * world
        said = (folder / "logs" / "rank-0.log").read_text()
        assert "steps are replayed from here on" in said, said


@pytest.mark.parametrize("kind", variations(BUFFERS, kept=["reassigned"]))
def test_buffers_of_all_kinds_are_joined_in_replayed_steps(kind: str, tmp_path: Path) -> None:
    task = f"{FOLLOWERS}:Buffers"
    values = {"task": task, "params": {"kind": kind}, "steps": 9, "epochs": None, "drop_last": True}
    runs = [replayed(tmp_path, world, **values) for world in (1, 4)]
    assert_same([train(tmp_path, 1, **values), *runs])


@pytest.mark.parametrize("world", variations([1, 4], kept=[4]))
def test_an_update_without_a_graph_follows_replayed_lanes(world: int, tmp_path: Path) -> None:
    values = {"epochs": 5, "clip": {"norm": 0.5}, **UNEVALUATED}
    assert_same([train(tmp_path, 1, **values), replayed(tmp_path, world, "as it is", **values)])


@pytest.mark.parametrize("precision", variations(["fp32", "fp16"], kept=["fp32"]))
def test_ranks_that_replay_and_ranks_that_do_not_learn_together_of_a_skipped_step(
    precision: str, tmp_path: Path
) -> None:
    """One rank's loss counts its calls and is not captured; all must talk in one order."""
    values: dict[str, Any] = {
        "task": "BadLoss", "params": {"step": 4, "optimizer": "fused"}, "on_nonfinite": "skip",
        "precision": precision, "epochs": 4,
    }  # fmt: skip
    eager = train(tmp_path, 1, **values)
    for world in (2, 4):
        folder = tmp_path / f"mixed-{world}"
        config = settings(folder=folder, **values)
        run_ranks(_train, world, config, str(folder / "record"), None)
        said = (folder / "logs" / "rank-0.log").read_text()
        assert "steps are replayed from here on" in said, said
        assert "the update runs without a graph" not in said, said
        assert "the loss of step 4 is NaN or infinite in lane 5" in said, said
        assert_same([eager, Recorded(folder)])
