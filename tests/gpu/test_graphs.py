"""CUDA graphs: the bits of eager steps, at any size, with everything inside."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from samestep.step.capture import capture
from tests.distributed.interrupting import finish, go_on
from tests.distributed.running import assert_same, settings, train
from tests.distributed.tasks import Everything
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHARED = {"device": "cuda", "backend": "gloo"}
FUSED = {"params": {"optimizer": "fused"}}
CASES: dict[str, dict[str, Any]] = {
    "batchnorm, dropout, tail, clipping, schedules": {"clip": {"norm": 0.5}, **FUSED},
    "momentum": {"params": {"optimizer": "fused momentum"}},
    "bf16, adaptive clipping": {"precision": "bf16", "clip": {"adaptive": 0.9}, **FUSED},
    "tf32": {"precision": "tf32", **FUSED},
    "fp16": {"precision": "fp16", "loss_scale": {"interval": 3}, "clip": {"norm": 0.5}, **FUSED},
    "one lane": {"lanes": 1, "clip": {"norm": 0.5}, **FUSED},
    "one lane, fp16": {"lanes": 1, "precision": "fp16", "loss_scale": {"interval": 3}, **FUSED},
    "skipping": {"on_nonfinite": "skip", **FUSED},
}


def graphed(folder: Path, world: int, graph: bool, width: int | str = "auto", **values: Any) -> Any:
    speed = {"graph": graph, "parallel_lanes": width}
    return train(folder, world, distributed=SHARED, speed=speed, **{"epochs": 5, **values})


@pytest.mark.parametrize("case", CASES)
def test_graphs_give_the_bits_of_eager_steps(case: str, tmp_path: Path) -> None:
    values = CASES[case]
    runs = [graphed(tmp_path, 1, False, **values), graphed(tmp_path, 1, True, **values)]
    assert_same(runs)
    assert len(set(runs[0].record.losses)) > 10
    said = [(run.folder / "logs" / "rank-0.log").read_text() for run in runs]
    assert ["are replayed from here on" in text for text in said] == [False, True]


@pytest.mark.parametrize("case", ["batchnorm, dropout, tail, clipping, schedules", "fp16"])
def test_graphs_give_the_same_bits_on_ranks_that_share_a_gpu(case: str, tmp_path: Path) -> None:
    assert_same([graphed(tmp_path, world, True, **CASES[case]) for world in (1, 2, 4)])


def test_any_number_of_lanes_side_by_side_gives_the_same_bits(tmp_path: Path) -> None:
    values = CASES["batchnorm, dropout, tail, clipping, schedules"]
    runs = [graphed(tmp_path, 1, True, width, **values) for width in (1, 2, 3, 8)]
    assert_same([graphed(tmp_path, 1, False, **values), *runs])
    said = [(run.folder / "logs" / "rank-0.log").read_text() for run in runs]
    for width, text in zip((1, 2, 3, 8), said, strict=True):
        assert f"{width} of 8 lanes side by side" in text


@pytest.mark.parametrize("task", ["Everything", "PaddedTokens"])
def test_an_optimizer_that_cannot_be_captured_updates_after_captured_lanes(task: str, tmp_path: Path) -> None:
    """As people's own AdamW(model.parameters()), and every default here."""
    values = {"distributed": SHARED, "epochs": 5, "clip": {"norm": 0.5}}
    eager = train(tmp_path, 1, task, speed={"graph": False}, **values)
    runs = [train(tmp_path, world, task, **values) for world in (1, 2, 4)]
    assert_same([eager, *runs])
    said = (runs[0].folder / "logs" / "rank-0.log").read_text()
    assert "the update runs without a graph: AdamW reads its learning rate on the host" in said
    assert "steps are replayed from here on" in said


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_loss_that_is_no_number_is_skipped_by_fused_optimizers(precision: str, tmp_path: Path) -> None:
    """Loss and gradients are bad at once, which must count once."""
    values: dict[str, Any] = {
        "task": "BadLoss", "params": {"step": 4, "optimizer": "fused"}, "on_nonfinite": "skip",
        "precision": precision, "epochs": 3, "distributed": SHARED,
    }  # fmt: skip
    runs = [train(tmp_path, world, **values) for world in (1, 2, 4)]
    assert_same(runs)
    assert all(tensor.isfinite().all() for tensor in runs[0].state.values())


def test_a_graphed_run_goes_on_at_other_sizes(tmp_path: Path) -> None:
    values = {"checkpoint": {"every_steps": 2}, "epochs": 6, "distributed": SHARED, "speed": {"graph": True}, **FUSED}
    untouched = train(tmp_path, 1, **values)
    folder = tmp_path / "run"
    go_on(folder, 2, at=7, rank=1, how="SIGTERM", **values)
    ended = finish(folder, 1, **values)
    assert 0 < ended.record.start < 18
    assert ended.record.state_hash == untouched.record.state_hash


def test_a_graph_outlives_those_captured_beside_it() -> None:
    """torch forgets what products work in on the stream of a graph that goes."""
    torch.manual_seed(0)
    left, right = (torch.randn(shape, device="cuda") for shape in ((64, 65536), (65536, 64)))
    right.requires_grad_()
    made: list[torch.Tensor] = []
    other = torch.randn(64, 64, device="cuda")
    other @ other  # cuBLAS cannot be opened in a capture
    graph = capture(lambda: made.append(left @ right))
    graph.replay()
    expected = made[0].clone()
    for _ in range(3):
        gone = capture(lambda: other @ other)
        gone.replay()
        del gone
        torch.cuda.empty_cache()
        kept = [torch.full((1 << 20,), 7, device="cuda", dtype=torch.int32) for _ in range(64)]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(made[0], expected)
        assert all(bool((block == 7).all()) for block in kept)


def _in_turns(configs: list[dict[str, Any]], steps: int) -> list[list[float]]:
    """Each run's losses, with their steps interleaved; each run opens after the others captured."""
    import samestep
    from samestep.train.loop import Training

    losses: list[list[float]] = []
    with contextlib.ExitStack() as stack:
        turns = []
        for config in configs:
            run = stack.enter_context(samestep.start(config))
            turns.append(Training(run, Everything(optimizer="fused")).steps())
            losses.append([])
            for _ in range(steps):
                for turn, found in zip(turns, losses, strict=True):
                    found.append(float(next(turn).loss))
    return losses


def test_graphs_of_several_runs_in_one_process_do_not_disturb_each_other(tmp_path: Path) -> None:
    configs = [
        settings("Everything", tmp_path / name, distributed=SHARED, speed={"graph": True}, epochs=20)
        for name in ("first", "second", "third", "alone")
    ]
    for config in configs:
        config.pop("task")
    [together] = run_ranks(_in_turns, 1, configs[:3], 9)
    [[alone]] = run_ranks(_in_turns, 1, configs[3:], 27)
    assert [len(losses) for losses in together] == [27, 18, 9]
    assert all(losses == alone[: len(losses)] for losses in together)


def _refusals(config: dict[str, Any], kind: str) -> str:
    import random

    import samestep
    from samestep.errors import GraphError

    class Counter(samestep.RunListener):
        steps = 0

        def on_record(self, record: samestep.StepRecord) -> None:
            self.steps += 1

    task = Everything()
    calls, weight = [0], 1.0

    def loss(batch: Any) -> Any:
        out = model(batch.x)
        value = F.cross_entropy(out, batch.y, reduction="sum")
        calls[0] += 1
        if kind == "reads the device":
            value = value * float(out.sum().item() > -1e9)
        if kind == "draws on the host":
            value = value * (1 + 0 * random.random())
        if kind == "reads the samples":
            value = value * (1 + 0 * sum(batch.ids))
        if kind == "changes in Python":
            value = value * (1 + calls[0])
        if kind == "refers to a number that changes":
            value = value * weight
        return value, len(batch)

    try:
        with samestep.start(config) as run:
            seen = Counter()
            run.add_listener(seen)
            model = task.model()
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            model, optimizer = run.prepare(model, optimizer)
            for step in run.steps(task.train_data()):
                weight = 1.0 + step.index
                step.train(loss)
    except GraphError as error:
        return str(error)
    return f"{seen.steps} steps"


WORDS = {
    "reads the device": "cannot be captured",
    "draws on the host": "draws random numbers on the host",
    "reads the samples": "reads batch.ids",
    "changes in Python": "gives other numbers than the eager one",
    "refers to a number that changes": "weight (which the loss function refers to) keeps changing",
}


@pytest.mark.parametrize("kind", WORDS)
def test_what_cannot_be_captured_is_refused_or_runs_eagerly(kind: str, tmp_path: Path) -> None:
    device = {"device": "cuda"}
    for graph, expected in ((True, WORDS[kind]), ("auto", "18 steps")):
        config = settings(
            "Everything", tmp_path / str(graph), distributed=device, epochs=6, lanes=1, speed={"graph": graph}
        )
        assert expected in run_ranks(_refusals, 1, config, kind)[0]


def _graph_waits(config: dict[str, Any]) -> int:
    import samestep

    task = Everything()
    with samestep.start(config) as run:
        model = task.model()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model, optimizer = run.prepare(model, optimizer)
        made = task.train_data()
        data = torch.utils.data.TensorDataset(made.x.pin_memory(), made.y.pin_memory())
        for step in run.steps(data):
            torch.cuda.set_sync_debug_mode("error" if step.index > 12 else "default")
            step.train(lambda b: (F.cross_entropy(model(b.x), b.y, reduction="sum"), len(b)))
            torch.cuda.set_sync_debug_mode("default")
        return step.index + 1


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_replayed_step_never_waits_for_the_device(precision: str, tmp_path: Path) -> None:
    config = settings(
        "Everything", tmp_path / "run", log_every=5, clip={"norm": 0.5}, epochs=10, drop_last=True,
        distributed={"device": "cuda"}, speed={"graph": True}, precision=precision,
    )  # fmt: skip
    assert run_ranks(_graph_waits, 1, config) == [20]
