"""What the documents say is so: links, the reference, and every command as written."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_config_reference_is_the_schemas() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "config_reference.py"))["reference"]()
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert made == written, "run: python scripts/config_reference.py"


def bash_blocks(page: Path) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [_with_any_diagnosis(block) for block in blocks if not block.startswith("make")]


def _with_any_diagnosis(block: str) -> str:
    """The doctor's exit code tells what it found on this machine, which may be anything."""
    return re.sub(r"(?m)^(.*samestep doctor[^#\n]*)", r"\1 || true ", block)


@pytest.mark.parametrize(
    "name", ["README.md", "docs/launch.md", "docs/survive.md", "docs/doctor.md", "docs/lr.md"]
)
def test_every_command_of_a_document_runs_as_written(tmp_path: Path, name: str) -> None:
    """In one folder, in the order of reading, with the tools of this environment."""
    for folder in ("examples", "recipes"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": scripts, "OMP_NUM_THREADS": "1"}
    # The other pages use what the README has made.
    before = [] if name == "README.md" else ["samestep init mine"]
    blocks = bash_blocks(ROOT / name)
    assert len(blocks) >= 2
    for block in [*before, *blocks]:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
