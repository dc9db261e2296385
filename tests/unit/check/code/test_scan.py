"""Which files are read, how, and what is handed over."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from samestep.check.code.report import lines, summary
from samestep.check.code.rules import RULES, chosen_rules
from samestep.check.code.scan import LARGEST_CODE, Scan, scan
from samestep.errors import OutputError, PlanError

FOUND = "import torch\nx = torch.zeros(2).cuda()\n"


def scanned(*paths: Path, rules: str = "", ignore: str = "") -> Scan:
    return scan(paths, chosen_rules(rules, ignore))


def write(path: Path, text: str | bytes = FOUND) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def files_of(found: Scan) -> list[str]:
    return [Path(one.file).name for one in found.findings]


def test_folders_that_are_not_the_projects_are_left_out(tmp_path: Path) -> None:
    for folder in (".git", ".venv", "node_modules", "lib/site-packages", "__pycache__"):
        write(tmp_path / folder / "theirs.py")
    write(tmp_path / "env" / "pyvenv.cfg", "home = /usr\n")
    write(tmp_path / "env" / "theirs.py")
    write(tmp_path / "pkg" / "mine.py")
    assert files_of(scanned(tmp_path)) == ["mine.py"]


def test_links_in_circles_and_files_seen_twice(tmp_path: Path) -> None:
    mine = write(tmp_path / "pkg" / "mine.py")
    (tmp_path / "pkg" / "loop").symlink_to(tmp_path)
    (tmp_path / "again.py").symlink_to(mine)
    (tmp_path / "nowhere.py").symlink_to(tmp_path / "gone.py")
    (tmp_path / "circle.py").symlink_to(tmp_path / "circle.py")
    assert scanned(tmp_path, mine).files == 1


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    write(tmp_path / "mine.py")
    assert scanned(tmp_path).files == 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"def broken(:\n", "is not Python"),
        (b"\xff\xfe\x00binary", "is not text"),
        (b"x = '\xe9'\n", "is not text of the encoding"),
        (b"# coding: nonsense\n", "is not text of the encoding"),
        (b"#" * (LARGEST_CODE + 1), "is larger than"),
        (b"x = " + b"(" * 3000 + b")" * 3000, "is not Python"),
    ],
)
def test_files_that_cannot_be_read_are_named_and_the_others_read(content: bytes, why: str, tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.py", content)
    write(tmp_path / "good.py")
    found = scanned(tmp_path)
    assert files_of(found) == ["good.py"]
    assert why in found.skipped[str(bad)]
    with pytest.raises(OutputError, match="is "):
        scanned(bad)


def test_a_declared_encoding_counts(tmp_path: Path) -> None:
    write(tmp_path / "mine.py", b"# coding: latin-1\nname = '\xe9'\n" + FOUND.encode())
    assert scanned(tmp_path).findings[0].line == 4


@pytest.mark.parametrize(
    ("name", "message"), [("gone", "is not there"), ("notes.txt", "is no Python"), ("empty", "holds no")]
)
def test_nothing_to_read_is_an_error(name: str, message: str, tmp_path: Path) -> None:
    write(tmp_path / "notes.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(OutputError, match=message):
        scanned(tmp_path / name)


def cell(source: str | list[str], kind: str = "code") -> dict[str, object]:
    return {"cell_type": kind, "source": source, "metadata": {}}


def test_notebooks_are_read_cell_by_cell(tmp_path: Path) -> None:
    cells = [
        cell("# A title with model.cuda()", "markdown"),
        cell(["%matplotlib inline\n", "!pip install x\n", "import torch as t\n", "files = !ls\n"]),
        cell("%%bash\nmodel.cuda()"),
        cell("%%time\nif True:\n    %pwd\n    x = t.zeros(2).cuda()\nx?"),
        cell("def broken(:"),
    ]
    book = write(tmp_path / "book.ipynb", json.dumps({"cells": cells, "nbformat": 4}))
    found = scanned(book)
    [one] = found.findings
    assert (one.rule, one.cell, one.line) == ("cuda-call", 4, 4)
    assert one.place == f"{book}:cell 4:4"
    assert list(found.skipped) == [f"{book}:cell 5"]


def test_what_is_no_notebook_is_named(tmp_path: Path) -> None:
    for text in ("[]", "{", '{"worksheets": []}'):
        book = write(tmp_path / "book.ipynb", text)
        with pytest.raises(OutputError, match=r"book\.ipynb is "):
            scanned(book)


def test_a_comment_silences_its_line(tmp_path: Path) -> None:
    write(
        tmp_path / "mine.py",
        "import torch\n"
        "a = x.cuda()  # samestep: ok\n"
        "b = x.cuda()  # samestep: ok[first-gpu, cuda-call]\n"
        "c = x.cuda()  # samestep: ok[first-gpu]\n"
        "d = make(\n    1,  # samestep: ok\n).cuda()\n"
        "e = x.cuda()  # samestep: okay\n",
    )
    found = scanned(tmp_path)
    assert [one.line for one in found.findings] == [4, 8]
    assert found.silenced == 3


def test_rules_are_chosen_by_name(tmp_path: Path) -> None:
    write(tmp_path / "mine.py", FOUND + "y = 'cuda:0'\n")
    assert set(scanned(tmp_path).by_rule) == {"cuda-call", "first-gpu"}
    assert set(scanned(tmp_path, rules="first-gpu").by_rule) == {"first-gpu"}
    assert set(scanned(tmp_path, ignore="first-gpu, batchnorm").by_rule) == {"cuda-call"}
    with pytest.raises(PlanError, match="no rule cuda-cal"):
        chosen_rules("cuda-cal", "")
    with pytest.raises(PlanError, match="no rule is left"):
        chosen_rules("", ",".join(RULES))


def test_the_text_explains_each_rule_once(tmp_path: Path) -> None:
    write(tmp_path / "mine.py", FOUND + "y = x.cuda()\n")
    found = scanned(tmp_path)
    text = lines(found)
    assert sum(line.startswith("  why: ") for line in text) == 1
    assert f"{tmp_path / 'mine.py'}:3: cuda-call: `.cuda()`" in text
    assert summary(found) == "2 places in 1 file"
