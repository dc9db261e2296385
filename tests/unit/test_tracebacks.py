"""A person's error shows their frames, and not those of samestep and torch between them."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.errors import SamestepError, StepError
from samestep.losses.contrastive import supcon
from samestep.parsing.python_file import import_file
from samestep.tracebacks import format_error, show_own_frames

SCRIPT = """
import torch
from torch import nn


class Net(nn.Module):
    def forward(self, x):
        return x + torch.zeros(3)


def main():
    nn.Sequential(Net())(torch.zeros(2))


def reshapes():
    nn.Linear(2, 3)(torch.zeros(5))


def wraps():
    try:
        main()
    except RuntimeError as error:
        raise ValueError("mine") from error
"""


@pytest.fixture
def script(tmp_path: Path) -> Any:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return import_file(path, "mine_with_errors")


def error_of(function: Callable[[], object], kind: type[BaseException]) -> str:
    with pytest.raises(kind) as caught:
        function()
    return format_error(caught.value)


def test_frames_between_a_persons_own_are_left_out(script: Any) -> None:
    text = error_of(script.main, RuntimeError)
    assert "nn.Sequential(Net())(torch.zeros(2))" in text
    assert "return x + torch.zeros(3)" in text
    assert str(Path(torch.__file__).parent) not in text
    assert "frames of samestep and torch left out: python -X dev shows all" in text.splitlines()[1]
    assert text.splitlines()[-1].startswith("RuntimeError: The size of tensor a")


def test_what_fails_below_them_is_shown(script: Any) -> None:
    text = error_of(script.reshapes, RuntimeError)
    assert "nn.Linear(2, 3)(torch.zeros(5))" in text
    assert "F.linear(input, self.weight, self.bias)" in text, "the line that raised"


def test_an_error_that_came_from_another_shows_both(script: Any) -> None:
    text = error_of(script.wraps, ValueError)
    assert str(Path(torch.__file__).parent) not in text
    assert text.index("RuntimeError") < text.index("ValueError: mine")


def test_our_own_errors_need_no_frame_of_ours() -> None:
    text = error_of(lambda: supcon(torch.zeros(2), torch.zeros(2)), SamestepError)
    assert "losses/contrastive.py" not in text
    assert Path(__file__).name in text


def test_an_error_of_ours_alone_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that is all there is would else be no report at all."""
    monkeypatch.setattr("samestep.tracebacks._is_library", lambda filename: True)

    def fails() -> None:
        raise StepError("by itself")

    assert "in fails" in error_of(fails, StepError)


def test_whoever_shows_errors_already_goes_on_doing_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*error: object) -> None: ...

    monkeypatch.setattr(sys, "excepthook", theirs)
    show_own_frames()
    assert sys.excepthook is theirs
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    show_own_frames()
    assert sys.excepthook is not sys.__excepthook__
