"""The AMP trainers over ranks: one training to the bit, whatever they are cut into."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.errors import CheckpointError
from tests.amp_training import (
    EVEN,
    UNEVEN,
    Batch,
    DistributedAMPTrainer,
    config_of,
    digest,
    lanes_of,
    make_trainer,
    mean_loss,
    net,
    rank_and_world,
    run_lanes,
    tensors_of,
)
from tests.ranks import answers_of_ranks, run_ranks
from tests.variations import variations

WORLDS = (1, 2, 4)


def _train(
    precision: str, sizes: Sequence[int], overflow: tuple[int, int] | None
) -> tuple[str, list[float], list[list[float]]]:
    """A training of five steps: its end, its scales and this rank's losses."""
    with make_trainer(precision, initial_scale=1024.0, gradient_clip_max_norm=1.0) as trainer:
        scales, losses = [], []
        for lanes in lanes_of(5, sizes, overflow):
            losses += run_lanes(trainer, [lanes])
            scales.append(trainer.scale)
        return digest(trainer), scales, losses


@pytest.mark.requirement("003-SC-1", "003-T1-3", "003-T1-9", "003-ACC-2", "002-C-9")
@pytest.mark.parametrize(
    ("precision", "sizes", "overflow"),
    variations(
        [("fp32", EVEN, None), ("bf16", UNEVEN, None), ("fp16", UNEVEN, (2, 3)), ("fp16", (5, 3, 0, 0), (1, 1))],
        kept=[("fp16", UNEVEN, (2, 3))],
    ),
    ids=["fp32", "bf16, uneven", "fp16, uneven, overflow", "fp16, ranks without samples"],
)
def test_any_number_of_ranks_is_the_same_training(
    precision: str, sizes: Sequence[int], overflow: tuple[int, int] | None
) -> None:
    """On 4 ranks the overflow is one rank's alone; on 1 it is one accumulation step's."""
    ends, seen = set(), []
    for world in WORLDS:
        answers = run_ranks(_train, world, precision, sizes, overflow)
        assert len({end for end, _, _ in answers}) == 1, "the ranks of one training differ"
        ends.add(answers[0][0])
        seen.append([scales for _, scales, _ in answers])
        by_lane = [[loss for _, _, said in answers for loss in said[step]] for step in range(5)]
        if world == 1:
            alone = by_lane
        # As text, since a lane without samples has no number.
        assert str(by_lane) == str(alone), "each lane's loss is its own, on whichever rank"
    assert len(ends) == 1
    first = 512.0 if overflow else 1024.0
    expected = [1024.0 if overflow and step < overflow[0] else first for step in range(5)]
    expected = expected if precision == "fp16" else [1.0] * 5
    assert all(scales == expected for world in seen for scales in world)


def _train_uneven_ranks() -> tuple[str, int]:
    """Rank 0 drives three lanes of every step and rank 1 one; rank 1's data is over first."""
    rank, _ = rank_and_world()
    steps = lanes_of(4, UNEVEN)
    mine = [step[:3] if rank == 0 else step[3:] for step in steps]
    if rank == 1:
        mine = mine[:2]
    model = net(seed=rank)
    with DistributedAMPTrainer(
        model, config_of("fp32"), backend="gloo",  # the launcher knows rank and world
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.02),
        accumulation_steps=3 if rank == 0 else 1, loss_fn=mean_loss,
    ) as trainer:  # fmt: skip
        asked = 0
        for batch in trainer.batches(batch for step in mine for batch in step):
            trainer.training_step(batch)
            asked += 1
        return digest(trainer), asked


def _train_alone(steps: list[list[Batch | None]]) -> str:
    with make_trainer("fp32") as trainer:
        run_lanes(trainer, steps)
        return digest(trainer)


@pytest.mark.requirement("003-T1-16")
def test_ranks_of_uneven_speed_and_data_are_the_same_training() -> None:
    first, second = run_ranks(_train_uneven_ranks, 2)
    assert (first[1], second[1]) == (12, 4), "whole steps, as many as the longest data has"
    short = [[*lanes[:3], lanes[3] if n < 2 else None] for n, lanes in enumerate(lanes_of(4, UNEVEN))]
    assert {first[0], second[0]} == set(run_ranks(_train_alone, 1, short))


def _save_on_one_rank_alone(folder: str) -> str:
    """As loops do that were written for one process; and each rank naming itself."""
    rank, _ = rank_and_world()
    with make_trainer("fp16", log_dir=f"{folder}/logs") as trainer:
        assert isinstance(trainer, DistributedAMPTrainer)
        run_lanes(trainer, lanes_of(1))
        if rank == 0:
            trainer.save_checkpoint(f"{folder}/alone.pt")
            assert trainer.get_gradient_summary()["steps"] == 1
        trainer.save_checkpoint(f"{folder}/rank-{rank}.pt")
        trainer.save_checkpoint(f"{folder}/by-1-rank-{rank}.pt", rank=1)
        run_lanes(trainer, lanes_of(1, first=1))
        trainer.save_checkpoint(f"{folder}/each.pt", rank=rank)
        run_lanes(trainer, lanes_of(1, first=2))
        end = digest(trainer)
        trainer.load_checkpoint(f"{folder}/each.pt")
        run_lanes(trainer, lanes_of(1, first=2))
        assert digest(trainer) == end
        (Path(folder) / f"own-{rank}.pt").write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"own-.\.pt on rank 0 cannot be read"):
            trainer.load_checkpoint(f"{folder}/own-{rank}.pt")
        return end


@pytest.mark.requirement("003-T1-10", "003-T1-15")
def test_no_rank_waits_for_one_that_does_not_save(tmp_path: Path) -> None:
    first, second = run_ranks(_save_on_one_rank_alone, 2, str(tmp_path))
    assert first == second
    assert {"alone.pt", "each.pt"} <= {path.name for path in tmp_path.iterdir()}
    assert sorted(path.name for path in tmp_path.glob("*rank-?.pt")) == ["by-1-rank-1.pt", "rank-0.pt"]
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]


def _train_and_save(path: str) -> tuple[str, float]:
    with make_trainer("fp16", growth_interval=2) as trainer:
        run_lanes(trainer, lanes_of(3, UNEVEN, overflow=(1, 2)))
        trainer.save_checkpoint(path)
        run_lanes(trainer, lanes_of(3, UNEVEN, first=3))
        return digest(trainer), trainer.scale


def _load_and_go_on(path: str) -> tuple[str, float]:
    rank, _ = rank_and_world()
    with make_trainer("fp16", model=net(seed=50 + rank), growth_interval=2) as trainer:
        trainer.load_checkpoint(path)
        run_lanes(trainer, lanes_of(3, UNEVEN, first=3))
        return digest(trainer), trainer.scale


@pytest.mark.requirement("003-T1-11", "003-ACC-3")
def test_a_checkpoint_is_loaded_on_all_ranks_of_any_number(tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    untouched = run_ranks(_train_and_save, 2, path)
    for world in WORLDS:
        for answer in run_ranks(_load_and_go_on, world, path):
            assert answer == untouched[0], world


def _in_an_open_group() -> dict[str, Any]:
    import torch.distributed as dist

    assert not DistributedAMPTrainer.is_distributed()
    dist.init_process_group("gloo")
    try:
        assert DistributedAMPTrainer.is_distributed()
        with make_trainer("fp16") as trainer:
            run_lanes(trainer, lanes_of(3))
            end = digest(trainer)
        still_open = dist.is_initialized()
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return {"end": end, "open": still_open}


def _in_a_group_of_its_own() -> dict[str, Any]:
    import torch.distributed as dist

    with make_trainer("fp16") as trainer:
        assert isinstance(trainer, DistributedAMPTrainer)
        trainer.setup_distributed()
        trainer.setup_distributed()
        assert DistributedAMPTrainer.is_distributed()
        wrapped, as_rank_0 = trainer.wrap_model(trainer.model), tensors_of(net(seed=0))
        assert all(as_rank_0[name].equal(tensor) for name, tensor in tensors_of(trainer.model).items())
        assert {id(param) for param in wrapped.parameters()} == {id(param) for param in trainer.model.parameters()}
        run_lanes(trainer, lanes_of(3))
        end = digest(trainer)
    return {"end": end, "open": dist.is_initialized()}


@pytest.mark.requirement("003-T1-2", "003-T1-7", "003-T1-8", "003-T1-12")
def test_a_group_is_closed_by_whoever_opened_it() -> None:
    found, own = run_ranks(_in_an_open_group, 2), run_ranks(_in_a_group_of_its_own, 2)
    assert [answer["open"] for answer in found] == [True, True]
    assert [answer["open"] for answer in own] == [False, False]
    assert {answer["end"] for answer in [*found, *own]} == {found[0]["end"]}


def _train_wrapped(same: str) -> tuple[bool, list[float], list[float]]:
    """Whether the wrapped model is a DistributedDataParallel; the scales, with an overflow on rank 1; the end."""
    from torch.nn.parallel import DistributedDataParallel

    with make_trainer("fp16", initial_scale=1024.0, same=same) as trainer:
        assert isinstance(trainer, DistributedAMPTrainer)
        scales = []
        for lanes in lanes_of(3, overflow=(1, 3)):
            run_lanes(trainer, [lanes])
            scales.append(trainer.scale)
        is_ddp = isinstance(trainer.wrap_model(trainer.model), DistributedDataParallel)
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        return is_ddp, scales, weights.tolist()


@pytest.mark.requirement("003-T1-14", "003-I-1")
def test_distributed_data_parallel_itself_is_the_same_training_up_to_rounding() -> None:
    ours, wrapped = (run_ranks(_train_wrapped, 2, same) for same in ("bits", "rounding"))
    assert [answer[0] for answer in ours] == [False, False]
    assert [answer[:2] for answer in wrapped] == [(True, [1024.0, 512.0, 512.0])] * 2
    assert wrapped[0][2] == wrapped[1][2], "the ranks of one training differ"
    assert wrapped[0][2] == pytest.approx(ours[0][2], rel=1e-3, abs=1e-3)


def _wrapped_without_samples() -> None:
    with make_trainer("fp32", same="rounding") as trainer:
        trainer.training_step(None)


def test_a_batch_without_samples_is_refused_where_others_would_wait_for_it() -> None:
    for worked, text in answers_of_ranks(_wrapped_without_samples, 2):
        assert not worked
        assert "a batch has no samples, and DistributedDataParallel would wait" in text


def _fail_on_one_rank() -> None:
    rank, _ = rank_and_world()
    with make_trainer("fp16") as trainer:
        run_lanes(trainer, lanes_of(1))
        trainer.training_step((torch.zeros(4, 6 + rank), torch.zeros(4, 2)))
        trainer.training_step((torch.zeros(4, 6), torch.zeros(4, 2)))


def test_a_rank_that_fails_ends_the_others_with_its_name() -> None:
    (_, first), (_, second) = answers_of_ranks(_fail_on_one_rank, 2)
    assert "mat1 and mat2" in second, "its own error, as it was"
    assert "PeerLost" in first
    assert "rank 1" in first
