"""Any command line ends with a documented exit code: no traceback, and no file that it was not to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from samestep.cli import app
from tests.fuzz.property import cases, soon
from tests.fuzz.texts import GOOD, VALUES, overrides

EXIT_CODES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 75}
"""As samestep/errors.py lists them, with doctor's 5 and 6 and tune lr's 8."""

FILES = ("good.yaml", "bad.yaml", "deep.yaml", "missing.yaml", "run", "x" * 300, "a\x00b", "\udcff", "", ".", "-", "--")
NUMBERS = (
    "1",
    "2",
    "0",
    "-1",
    "2:4",
    "4:2",
    "²",
    "٣",
    "1_0",
    "x",
    "",
    "9" * 30,
    "1000000",
    "1000001",
    "1:2:3",
    ":",
    "1:",
)
PLACES = (
    "n1:29500",
    "n1:99999",
    "n1:0",
    "n1",
    "n1:",
    ":1",
    "n1:²",
    "[::1]:29500",
    "::1",
    "[::1]",
    "n 1:2",
    "-n:1",
    "n1:-1",
    "\x00:1",
    "n1:1:2",
)
HOSTS = ("a:4,b:4", "a,b", "a:0", "a:²", "a:" + "9" * 30, "a,,b", "-x:1", "a:1,a:1", "[::1]:2", "a b", "\x00")
ODD = st.sampled_from(VALUES) | st.text(max_size=10)


def one_of(*words: str) -> st.SearchStrategy[str]:
    return st.sampled_from(words) | ODD


files = st.sampled_from(FILES) | st.just("good.yaml")
options = st.one_of(
    st.tuples(st.just("--nproc"), one_of(*NUMBERS)),
    st.tuples(st.just("--nodes"), one_of(*NUMBERS)),
    st.tuples(st.just("--node-rank"), one_of(*NUMBERS)),
    st.tuples(st.just("--master-addr"), one_of("n1", "", "::1", "-x")),
    st.tuples(st.just("--master-port"), one_of("29500", "99999", *NUMBERS)),
    st.tuples(st.just("--rendezvous"), one_of(*PLACES)),
    st.tuples(st.just("--hosts"), one_of(*HOSTS)),
    st.tuples(st.just("--max-restarts"), one_of(*NUMBERS)),
    st.tuples(st.just("--via"), st.sampled_from(["torchrun", "srun", "slurm", "ssh", "x", ""])),
    st.tuples(st.sampled_from(["--time", "--partition", "--array"]), ODD),
    st.tuples(st.sampled_from(["--gpus-per-node", "--cpus-per-task"]), one_of(*NUMBERS)),
    st.tuples(st.sampled_from(["--zzz", "--json", "--follow"])),
)
launches = st.tuples(files, overrides, st.lists(options, max_size=4)).map(
    lambda parts: ["launch", parts[0], *parts[1], *(w for pair in parts[2] for w in pair), "--print"]
)
looks = st.tuples(
    st.sampled_from(
        [["check", "--facts"], ["show"], ["show", "--log"], ["runs"], ["plot"], ["stop"], ["--version"], ["sweep"], [],
         ["zzz"], ["\ud800"]]
    ),
    files,
    overrides,
    st.sampled_from([[], ["--json"], ["--verify"], ["--help"]]),
).map(lambda parts: [*parts[0], parts[1], *parts[2], *parts[3]])  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "work"
    (place / "run" / "checkpoints" / "step-²").mkdir(parents=True)
    (place / "run" / "metrics.jsonl").write_text("{\n")
    (place / "good.yaml").write_text(GOOD)
    (place / "bad.yaml").write_text("epochs: [")
    (place / "deep.yaml").write_text("[" * 3000)
    monkeypatch.chdir(place)
    return place


def tree(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def call(words: list[str]) -> Result:
    with soon():
        return CliRunner().invoke(app, words)


@cases(30)
@given(launches | looks)
@example(["launch", "good.yaml", "--nodes", "2", "--nproc", "1", "--rendezvous", "n1:99999", "--print"])
@example(["launch", "good.yaml", "--nproc", "9" * 30, "--print"])
@example(["launch", "good.yaml", "--via", "ssh", "--hosts", "a:" + "9" * 30, "--print"])
@example(
    [
        "launch",
        "good.yaml",
        "batch_per_rank=1",
        "global_batch=null",
        "accumulation=1000000",
        "--nproc",
        "1000000",
        "--print",
    ]
)
@example(["launch", "good.yaml", "params.x=\udcff", "--print"])
@example(["launch", "a\x00b", "--print"])
@example(["show", "good.yaml", "params.at=2024-01-01", "--json"])
@example(["show", "good.yaml", "params.b=!!binary aGk=", "--json"])
@example(["check", "\udcff"])
@example(["check", "x" * 300])
@example(["show", "run"])
@example(["show", "x" * 300])
@example(["show", "x/" * 3000])
@example(["check", "good.yaml", "task=" + "x" * 300 + ".py:T"])
@example(["show", "a\x00b"])
@example(["plot", "a\x00b"])
@example(["stop", "a\x00b"])
@example(["runs", "a\x00b"])
@example(["check", "a\x00b"])
def test_any_command_line_ends_with_a_documented_code(folder: Path, words: list[str]) -> None:
    before = tree(folder.parent)
    result = call(words)
    assert isinstance(result.exception, (SystemExit, type(None))), (words, result.exception)
    assert result.exit_code in EXIT_CODES
    assert "Traceback" not in result.output
    assert tree(folder.parent) == before
