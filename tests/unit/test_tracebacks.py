"""A person's error shows their frames, and not those of samestep and torch between them."""

from __future__ import annotations

import runpy
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.errors import PlanError, SamestepError
from samestep.lanes.plan import BatchPlan
from samestep.losses.contrastive import supcon
from samestep.parsing.json_text import read_json
from samestep.parsing.python_file import import_file
from samestep.tracebacks import _SAMESTEP, format_error, show_own_frames

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
    assert "frames of samestep and torch left out: PYTHONDEVMODE=1 shows all" in text.splitlines()[1]
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


def test_an_error_without_a_persons_frame_is_shown_whole() -> None:
    """What only samestep and libraries did, such as a file that a command opened."""

    def opens() -> None:
        read_json(Path("/nowhere/at/all"))

    opens.__code__ = opens.__code__.replace(co_filename=f"{_SAMESTEP}cli/opens.py")
    try:
        opens()
    except Exception as error:
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = format_error(error.with_traceback(frames))
    assert "left out" not in text
    assert "cli/opens.py" in text


def test_a_mistake_of_samestep_below_is_named(script: Any) -> None:
    code = compile(
        "def theirs(x):\n    import torch\n    return torch.nn.functional.linear(x, x[:1, :1])\n",
        f"{_SAMESTEP}wrong.py",
        "exec",
    )
    names: dict[str, Any] = {}
    exec(code, names)
    text = error_of(lambda: names["theirs"](torch.zeros(2, 3)), RuntimeError)
    assert "wrong.py" in text, "the deepest of samestep's frames"


def test_a_script_that_cannot_be_parsed_shows_where(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def f(:\n")
    with pytest.raises(SyntaxError) as caught:
        runpy.run_path(str(path))
    shown = format_error(caught.value)
    assert "broken.py" in shown
    assert "runpy.py" not in shown


def test_what_a_dataclass_generates_is_no_frame_of_a_person() -> None:
    text = error_of(lambda: BatchPlan(30, 8), PlanError)
    assert "<string>" not in text
    assert "plan.py" not in text


def test_a_long_chain_of_errors_is_reported() -> None:
    """The report of an error must never raise another one."""
    error: BaseException = ValueError("0")
    for number in range(1, 3000):
        later = ValueError(str(number))
        later.__context__ = error
        error = later
    assert "ValueError: 2999" in format_error(error)


def test_whoever_shows_errors_already_goes_on_doing_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*error: object) -> None: ...

    monkeypatch.setattr(sys, "excepthook", theirs)
    show_own_frames()
    assert sys.excepthook is theirs
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    show_own_frames()
    assert sys.excepthook is not sys.__excepthook__
