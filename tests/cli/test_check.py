"""The command that reads code, as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samestep.cli import app
from tests.cli.processes import ROOT, samestep

SINGLE = ROOT / "examples" / "ports" / "vae" / "single.py"
PORT = ROOT / "examples" / "ports" / "vae" / "samestep_port.py"


@pytest.mark.requirement("000-P0-1")
def test_scan_exits_by_what_it_finds(tmp_path: Path) -> None:
    found = samestep("check", SINGLE, cwd=tmp_path)
    assert found.returncode == 5, found.stderr
    assert f"{SINGLE}:50: shuffled-loader" in found.stdout
    assert "train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)" in found.stdout
    assert "write: the same loader, given to `run.prepare" in found.stdout
    clean = samestep("check", PORT, "--json", cwd=tmp_path)
    assert clean.returncode == 0, clean.stderr
    assert json.loads(clean.stdout)["findings"] == []
    wrong = samestep("check", "nowhere", cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "nowhere is not there" in wrong.stderr


def test_scan_lists_rules_and_hands_over_json(tmp_path: Path) -> None:
    def here(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["check", *arguments])
        return done.exit_code, done.stdout

    marker = tmp_path / "was_run"
    (tmp_path / "mine.py").write_text(f"import torch\nopen({str(marker)!r}, 'w')\nx = torch.zeros(1).cuda()\n")
    assert here(str(tmp_path))[0] == 5
    assert not marker.exists()
    code, listed = here("--list")
    assert code == 0
    assert "forward-state" in listed
    for words in (["c.yaml", str(SINGLE)], ["a.yaml", "b.yaml"], ["--rules", "batchnorm"]):
        assert here(*words)[0] == 2
    assert here(str(SINGLE), "--rules", "nonsense")[0] == 2
    code, shown = here(str(SINGLE), "--json", "--rules", "save-by-all")
    found = json.loads(shown)
    assert (code, found["rules"], found["files"]) == (5, {"save-by-all": 1}, 1)
    one = found["findings"][0]
    assert one["line"] == 78
    assert {"rule", "effect", "file", "column", "cell", "code", "title", "why", "instead"} <= set(one)
