from __future__ import annotations

from pathlib import Path

import pytest

from samestep.errors import LaunchError
from samestep.launch.commands.plain_script import PlainScript, opens_run, plain_command
from samestep.launch.commands.size import Size


@pytest.mark.parametrize(
    ("text", "opens"),
    [
        ("import samestep\nwith samestep.start() as run: pass", True),
        ("from samestep import start as begin", True),
        ("import samestep as s\ns.start()", True),
        ("import samestep\nprint(samestep.__version__)", False),
        ("import torch, threading\nthreading.Thread().start()", False),
        ("import beside", True),
        ("from package import inner", True),
        ("from package.inner import *", True),
        ("import package", False),
        ("import itself", False),
        ("this is no Python", False),
    ],
)
def test_a_script_opens_a_run_itself_or_by_a_module_beside_it(tmp_path: Path, text: str, opens: bool) -> None:
    starts = "import samestep\ndef main():\n    return samestep.start()"
    (tmp_path / "beside.py").write_text("from package.relative import x")
    (tmp_path / "itself.py").write_text("import itself")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "relative.py").write_text("from .inner import x")
    (tmp_path / "package" / "inner.py").write_text(starts)
    (tmp_path / "script.py").write_text(text)
    assert opens_run(tmp_path / "script.py") is opens


def test_a_missing_script_opens_none(tmp_path: Path) -> None:
    assert not opens_run(tmp_path / "script.py")
    with pytest.raises(LaunchError, match="no such file"):
        plain_command(PlainScript(str(tmp_path / "script.py")), Size(2, 2))


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (PlainScript("some folder/-my train.py"), "_my_train"),
        (PlainScript("package.train", is_module=True), "train"),
        (PlainScript("a" * 200 + ".py"), "a" * 100),
    ],
)
def test_the_folder_of_its_output_has_a_plain_name(script: PlainScript, name: str) -> None:
    assert script.run_name == name


def test_torchrun_would_be_given_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = PlainScript("package.train", True, ("--lr", "0.1"))
    command = plain_command(script, Size(2, 2), max_restarts=1)
    assert (
        command.script().rstrip().endswith("--standalone --nproc-per-node=2 --max-restarts=1 -m package.train --lr 0.1")
    )
    assert command.threads == 1, "as with torchrun"
    assert command.rank_argv[-4:] == ("-m", "package.train", "--lr", "0.1")
