"""Batches that a function draws, and generators: the same run at any size, and resumed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import samestep
from samestep.data.generated import Generated
from samestep.data.iterable import Strided
from samestep.errors import Stopped, TaskError, UserError
from tests.distributed.running import digest
from tests.distributed.test_own_loops import _keys, _net
from tests.ranks import run_ranks
from tests.variations import variations

TOKENS = torch.arange(500) * 7919 % 97


def get_batch(generator: torch.Generator, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As nanoGPT's, and with one draw of numpy's besides."""
    at = torch.randint(len(TOKENS) - 8, (size,), generator=generator)
    x = torch.stack([TOKENS[i : i + 8] for i in at]).float() + np.random.rand()
    return x / 97, torch.stack([TOKENS[i + 8 - 1] for i in at]) % 4


def pairs() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for start in range(0, 440, 5):
        yield TOKENS[start : start + 8] / 97, TOKENS[start + 8] % 4


def _train(folder: str, kind: str, stop: int | None = None, **changes: Any) -> tuple[str, list[str]]:
    seen: list[str] = []
    model = _net()
    data: Any = Strided(pairs)
    if kind != "generator":
        data = samestep.Generated(get_batch, steps_per_epoch=3 if kind == "epochs" else None)
    length: dict[str, Any] = {"epochs": 3} if kind == "epochs" else {"epochs": None, "steps": 7}
    if kind == "workers":
        length["loader"] = {"workers": 2}
    try:
        with samestep.start(**_keys(folder, **length, **changes)) as run:
            model = _net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model, optimizer = run.prepare(model, optimizer)
            if stop is not None:
                run.pause_after(stop)
            for _ in run.epochs() if kind == "epochs" else [0]:
                for _, (x, y) in run.enumerate(data):
                    optimizer.zero_grad()
                    run.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    got = run.gather(x).numpy().tobytes()
                    seen.append(f"{run.step} {hashlib.blake2b(got, digest_size=8).hexdigest()}")
    except Stopped:
        pass
    return digest(model), seen


@pytest.mark.parametrize("kind", variations(["steps", "epochs", "generator"], kept=["generator"]))
def test_drawn_data_is_the_same_at_any_size_and_resumed(kind: str, tmp_path: Path) -> None:
    whole = run_ranks(_train, 1, str(tmp_path / "1"), kind)[0]
    assert len(set(whole[1])) == len(whole[1]) == (9 if kind == "epochs" else 7), "none twice"
    for world in (2, 4):
        for answer in run_ranks(_train, world, str(tmp_path / str(world)), kind):
            assert answer == whole
    folder = str(tmp_path / "parts")
    first = run_ranks(_train, 4, folder, kind, 2)[0]
    second = run_ranks(_train, 2, folder, kind, 5)[0]
    third = run_ranks(_train, 1, folder, kind)[0]
    assert first[1] + second[1] + third[1] == whole[1]
    assert third[0] == whole[0]


def test_loader_processes_and_fused_lanes_draw_the_same(tmp_path: Path) -> None:
    whole = run_ranks(_train, 1, str(tmp_path / "1"), "steps")[0]
    assert run_ranks(_train, 2, str(tmp_path / "workers"), "workers")[0] == whole
    for world in (1, 2):
        folder = str(tmp_path / f"fused-{world}")
        fused = run_ranks(partial(_train, same="samples"), world, folder, "steps")[0]
        assert fused[1] == whole[1], "the same samples"


def test_another_seed_draws_others(tmp_path: Path) -> None:
    whole = run_ranks(_train, 1, str(tmp_path / "1"), "steps")[0]
    assert not set(whole[1]) & set(run_ranks(partial(_train, seed=2), 1, str(tmp_path / "2"), "steps")[0][1])


def _misuse(folder: str, kind: str) -> None:
    length: dict[str, Any] = {} if kind == "endless" else {"epochs": None, "steps": 2}
    data: Any = samestep.Generated(get_batch)
    if kind == "too few":
        data = samestep.Generated(lambda generator, size: torch.zeros(2, 8))
    if kind == "generator object":
        data = pairs()
    with samestep.start(**_keys(folder, checkpoint={"enabled": False}, **length)) as run:
        model = _net()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        collate = torch.stack if kind == "collate" else None
        for step in run.steps(data, collate=collate):  # type: ignore[arg-type]
            step.train(lambda batch: model(batch.data).sum())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("endless", "what a function draws has no end: set steps"),
        ("too few", "asked for 4 samples, the size of a lane, and returned tensors with 2 rows"),
        ("collate", "takes no order or collate"),
        ("generator object", "the function of a generator, in samestep.Strided"),
    ],
)
def test_draws_that_are_no_run_are_refused(kind: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        _misuse(str(tmp_path / "run"), kind)


def test_what_could_be_read_only_once_is_refused() -> None:
    with pytest.raises(TaskError, match="can be read only once"):
        Strided(pairs())
    with pytest.raises(TaskError, match=r"<lambda>\(generator, size\)"):
        Generated(lambda split: split)  # type: ignore[arg-type, misc]
    with pytest.raises(TaskError, match="steps_per_epoch=0"):
        Generated(get_batch, 0)
