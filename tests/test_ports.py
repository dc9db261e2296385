"""The ports of examples/ports: what they change, that they run, and that they are one run at any size."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.cli.processes import ROOT, run, samestep
from tests.variations import variations

TABLE = runpy.run_path(str(ROOT / "scripts" / "ports_table.py"))
PORTS, NAMES = TABLE["PORTS"], TABLE["NAMES"]


def test_the_table_of_the_document_is_what_is_counted() -> None:
    written = TABLE["PAGE"].read_text(encoding="utf-8")
    # That they are identical is what the tests below prove.
    made = TABLE["with_table"](written, TABLE["table"](dict.fromkeys(NAMES, True)))
    assert made == written, "run: python scripts/ports_table.py"


def test_the_diffs_of_the_document_are_those_of_the_files() -> None:
    written = TABLE["PAGE"].read_text(encoding="utf-8")
    assert len(TABLE["DIFF"].findall(written)) == 1
    assert TABLE["with_diffs"](written) == written, "run: python scripts/ports_table.py"


def test_every_example_is_in_the_table() -> None:
    assert {path.parent.name for path in PORTS.glob("*/single.py")} == set(NAMES)


def test_only_code_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("a = 1\n\n    # why\nb = 2  # what\n")
    assert TABLE["code_lines"](file) == ["a = 1", "b = 2  # what"]


@pytest.mark.parametrize("name", variations(NAMES, kept=["gpt"]))
def test_a_port_is_one_run_at_any_size(name: str, tmp_path: Path) -> None:
    script = PORTS / name / "samestep_port.py"
    done = samestep("verify", script, "--worlds", TABLE["WORLDS"], "--steps", "6", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    worlds = json.loads(done.stdout)["worlds"]
    assert {world: found["steps"] for world, found in worlds.items()} == dict.fromkeys("124", 6)
    assert len({found["state_hash"] for found in worlds.values()}) == 1


@pytest.mark.parametrize("name", variations(NAMES, kept=["gpt", "vae"]))
def test_the_other_two_run_on_one_process_and_print_the_same(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed: pip install -e '.[dev]'")
    printed = []
    for script in ("single.py", "accelerate_port.py"):
        done = run([sys.executable, str(PORTS / name / script)], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert "loss" in printed[0]
    assert printed[0] == printed[1]
