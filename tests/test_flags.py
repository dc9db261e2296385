"""docs/decisions.md, its table of the plans' flags: every override and option in it exists, and is accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from samestep.cli import app
from samestep.config import read_config
from samestep.config.aliases import ALIASES
from samestep.config.reference import schema_keys

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
TABLE = TEXT[TEXT.index("<!-- flags: begin -->") : TEXT.index("<!-- flags: end -->")]
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| `")]
# The options that the plans name, on their own command lines and on those of their scripts and launchers.
FLAGS = {
    "--distributed", "--backend", "--local-rank", "--local_rank", "--distributed-config", "--config", "--nproc_per_node",
    "--num_gpus", "--nnodes", "--node_rank", "--master_addr", "--master_port", "--ddp", "--gpus_per_node", "--nodes",
    "--gres", "--ntasks-per-node", "--time", "--bind-to", "--map-by",
}  # fmt: skip
# What an option or override must come to.
IN_SCRIPTS = {
    "--gpus-per-node 4": "#SBATCH --gpus-per-node=4\n", " gpus_per_node=4": "#SBATCH --gpus-per-node=4\n",
    "--nodes 2 --gpus": "#SBATCH --nodes=2\n", " nodes=2": "#SBATCH --nodes=2\n", "--time 72:00:00": "#SBATCH --time=72:00:00\n",
    "--master-addr gpu01": " --master-addr=gpu01 ",
    "--nproc 4": " --nproc-per-node=4 ",
}  # fmt: skip
SETS_BATCH = ("batch_size=", "global_batch_size=")


def spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


EXAMPLES = [example for row in ROWS for example in spans(row[2])]


def test_every_flag_of_the_plans_has_a_row() -> None:
    named = {name for row in ROWS for name in spans(row[0])}
    assert named >= FLAGS
    keys = {name for name in named if not name.startswith("--")} - {"sync_before_step", "remainder"}
    assert keys <= {*schema_keys(), *ALIASES}


def test_a_row_has_an_example_or_is_struck_with_a_reason() -> None:
    for row in ROWS:
        assert spans(row[2]) or (row[2] == "struck" and len(row[3]) > 40), row


@pytest.mark.requirement("000-K-6", "000-K-7", "004-3.2-1", "004-3.2-2", "004-3.2-3", "000-P0-9")
@pytest.mark.parametrize("line", [e for e in EXAMPLES if e.startswith("samestep ")])
def test_a_command_knows_its_options_and_takes_its_overrides(line: str) -> None:
    _, name, *words = shlex.split(line)
    known: Any = get_command(app)
    options = {opt for given in known.commands[name].params for opt in getattr(given, "opts", ())}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options
    overrides = [word for word in words if re.match(r"[a-z_.]+=", word)]
    batch = {} if any(o.startswith(SETS_BATCH) for o in overrides) else {"batch_per_rank": 8}
    loaded = read_config({"task": "task.py:Digits", "epochs": 1, **batch}, overrides)
    origins = {key: origin for key, _, origin in loaded.rows()}
    for key in (override.partition("=")[0] for override in overrides):
        expected = f"override as {key}" if key in ALIASES else "override"
        assert origins[ALIASES.get(key, key)] == expected


@pytest.mark.parametrize("line", [e for e in EXAMPLES if not e.startswith("samestep ")])
def test_a_script_knows_its_options(line: str) -> None:
    script, *words = shlex.split(line)
    text = (ROOT / script).read_text(encoding="utf-8")
    assert all(word in text for word in words if word.startswith("--"))


@pytest.mark.requirement("004-3.1-1", "004-3.1-3", "004-3.2-4", "004-3.2-5")
@pytest.mark.parametrize("line", [e for e in EXAMPLES if e.startswith("samestep launch ")])
def test_a_launch_can_be_started_so(line: str) -> None:
    _, *words = shlex.split(line)
    words[1] = str(ROOT / "recipes" / "digits" / "config.yaml")
    done = CliRunner().invoke(app, [*words, "--print"])
    assert done.exit_code == 0, done.output
    assert "samestep train" in done.stdout
    for written in (text for asked, text in IN_SCRIPTS.items() if asked in line):
        assert written in done.stdout
