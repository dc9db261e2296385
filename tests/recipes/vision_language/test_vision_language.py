"""The whole recipe on few steps, by the command that runs it; and its pictures, products and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.processes import ROOT, samestep
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("recipe")
RECIPE = ROOT / "recipes" / "vision_language"
SMALL = ("params.dim=16", "params.warmup=2", "global_batch=8", "loss_scale.interval=3")
PLANTED, SAVED = 2, 4


def _train(words: list[str]) -> int:
    sys.path.insert(0, str(RECIPE))
    from train import main

    return main(words)


@pytest.mark.requirement("003-ACC-1")
def test_the_recipe_from_pictures_to_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test, for all of it is about the same trainings."""
    import run as recipe

    def as_ranks(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """What torchrun would start, forked by a process that has torch imported."""
        world = int(command[5]) if "torch.distributed.run" in command else 1
        words = command[command.index(str(RECIPE / "train.py")) + 1 :]
        codes = run_ranks(_train, world, words)
        return subprocess.CompletedProcess(command, max(codes), stdout="")

    monkeypatch.setattr(subprocess, "run", as_ranks)
    folder = tmp_path / "whole"
    assert recipe.main([str(folder), "--steps", "8", "--held-out", "12", *SMALL]) == 0
    results = json.loads((folder / "results.json").read_text())
    assert results["same"]
    assert [results[kind]["worlds"] for kind in ("fp16", "bf16")] == [[1, 2, 4], [1, 2, 4]]
    assert (results["planted"], results["fp16"]["skipped"]) == (PLANTED, [PLANTED])
    assert [(one["world"], one["from"]) for one in results["resumed"]] == [(1, SAVED), (4, SAVED)]
    assert_the_overflow_is_one_ranks_and_the_scale_is_everybodys(recipe, folder)
    assert_another_training_would_be_noticed(recipe, folder)
    page = (folder / "results.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 12


def assert_the_overflow_is_one_ranks_and_the_scale_is_everybodys(recipe: Any, folder: Path) -> None:
    four = recipe.Training(folder / "fp16-4")
    assert [rank["lanes"] for rank in four.ranks] == [[0], [1], [2], [3]]
    # Halved by the overflow in step 2, doubled after three more steps: the resumed ones know how many passed.
    expected = [32768.0] * 3 + [16384.0] * 3 + [32768.0] * 2
    assert [rank["scales"] for rank in four.ranks] == [expected] * 4
    assert recipe.Training(folder / "resumed-4").scales == expected[SAVED:]
    assert {one["precision"] for one in four.ranks} == {"float16"}


def assert_another_training_would_be_noticed(recipe: Any, folder: Path) -> None:
    one, two = recipe.Training(folder / "fp16-1"), recipe.Training(folder / "fp16-2")
    assert two.is_the_end_of(one)
    assert not recipe.Training(folder / "bf16-1").is_the_end_of(one)
    two.losses[5][3] += 1e-7
    assert not two.is_the_end_of(one)
    two.ranks[1]["scales"][3] *= 2
    assert not two.ranks_agree()


def test_the_same_model_is_trained_by_the_task_loop(tmp_path: Path) -> None:
    """Its batches are drawn by a function, which no collate function is for."""
    words = (*SMALL, "steps=2", "run_dir=run", "distributed.device=cpu")
    done = samestep("train", RECIPE / "config.yaml", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "finished"


def test_captions_say_what_is_drawn_and_a_tenth_is_held_out() -> None:
    from pictures import COLOURS, Scene, draw, is_held_out, text_of, tokens_of

    assert Scene(2, "red", "cross", 0, 1).caption() == "two red crosses at the top right"
    pictures, captions = draw(np.random.default_rng(3), 64)
    again, _ = draw(np.random.default_rng(3), 64)
    assert np.array_equal(pictures, again)
    assert not any(map(is_held_out, captions))
    assert all(map(is_held_out, draw(np.random.default_rng(3), 8, held_out=True)[1]))
    assert [text_of(row[1:].tolist()) for row in tokens_of(captions)] == captions
    for picture, caption in zip(pictures, captions, strict=True):
        _, colour, *_, row, column = caption.split()
        half = slice(0, 16), slice(16, 32)
        inside = picture[half[row == "bottom"], half[column == "right"]].astype(float)
        assert inside.std() > 2 * picture[half[row == "top"], half[column == "left"]].std()
        brightest = inside.reshape(-1, 3)[inside.sum(-1).argmax()]
        nearest = min(COLOURS, key=lambda name: np.abs(_direction(COLOURS[name]) - _direction(brightest)).sum())
        assert nearest == colour


def _direction(colour: Any) -> np.ndarray:
    return np.asarray(colour, dtype=float) / np.linalg.norm(colour)


def test_products_are_those_of_numbers_of_16_bits() -> None:
    from networks import product

    torch.manual_seed(0)
    a, b = torch.randn(5, 7, requires_grad=True), torch.randn(3, 7, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        out = product(a, b)
        assert torch.equal(out, a.half() @ b.half().t())
    assert out.dtype == torch.float16
    out.backward(torch.full_like(out, 60000))
    assert a.grad is not None
    assert a.grad.dtype == torch.float32
    assert a.grad.isinf().any(), "where a gradient of 16 bits overflows"
    assert torch.equal(product(a, b), a @ b.t())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lanes=null"], "global_batch is 32 and lanes is None: set both"),
        (["--overflow=1", "precision=bf16"], "--overflow needs precision fp16, and it is bf16"),
        (["--held-out=0"], "--held-out is 0: give 1 or more"),
        (["params.dim=15"], "params.dim is 15, which 2 heads do not divide"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    import train

    assert train.main([str(RECIPE / "config.yaml"), str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err
