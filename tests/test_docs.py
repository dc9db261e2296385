"""What the documents say is so: links, the reference, and every command as written."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from samestep.config import load_config
from samestep.config.layers import LAYER_KEYS
from samestep.parsing.plain_yaml import parse_yaml
from samestep.sweep.loading import with_objectives
from samestep.sweep.schema import SweepConfig
from samestep.sweep.space import parse_space
from tests.preloaded.client import ROOT, environment, shell_path
from tests.variations import variations

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_config_reference_is_the_schemas() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "config_reference.py"))
    written = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert script["reference"]() == written, "run: python scripts/config_reference.py"
    kept = (ROOT / "src" / "samestep" / "config" / "keywords.py").read_text(encoding="utf-8")
    assert script["keywords"]() == kept, "run: python scripts/config_reference.py"


def test_the_reference_of_commands_is_the_command_lines() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "cli_reference.py"))["reference"]()
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert made == written, "run: python scripts/cli_reference.py"


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Every page is in its navigation, and every link and anchor leads somewhere."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    surroundings = {**environment(), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    pages = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").glob("*.md")]
    assert all((tmp_path / "site" / page).exists() for page in pages)
    assert "Take modules, optimizers, schedulers" in (tmp_path / "site" / "api.html").read_text(encoding="utf-8")


def test_the_pictures_of_the_guide_are_what_their_script_draws() -> None:
    for name, drawn in runpy.run_path(str(ROOT / "scripts" / "pictures.py"))["pictures"]().items():
        assert (ROOT / "docs" / "images" / name).read_text(encoding="utf-8") == drawn, "run: python scripts/pictures.py"


@pytest.mark.requirement("003-A-1")
def test_the_diagram_of_ranks_is_what_its_script_draws() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "rank_diagram.py"))
    assert script["PICTURE"].read_text(encoding="utf-8") == script["diagram"](3, 3, 18)
    assert script["diagram"](2, 4, 8).count(">rank ") == 8
    assert script["OWNERS"].read_text(encoding="utf-8") == script["owners_diagram"]()


def _keys() -> set[str]:
    rows = (ROOT / "docs" / "config.md").read_text(encoding="utf-8").splitlines()
    return {found[1] for row in rows if (found := re.match(r"\| `([a-z_.]+)` \|", row))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_are_spelled_as_the_config_spells_them(page: Path) -> None:
    keys = _keys()
    sections = {key.rpartition(".")[0] for key in keys} - {""}
    said = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)\b[^`(]*`", page.read_text(encoding="utf-8"))
    about = {name for name in said if name.rpartition(".")[0] in sections}
    unknown = {name for name in about - keys - sections if not name.endswith(".py")}
    assert not unknown


def yaml_blocks(page: Path) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


WITH_CONFIGS = [page for page in PAGES if yaml_blocks(page)]


@pytest.mark.parametrize("page", WITH_CONFIGS, ids=lambda page: page.name)
def test_every_config_of_a_document_is_one(page: Path) -> None:
    """A part of one: what a run needs besides is filled in."""
    for block in yaml_blocks(page):
        given = yaml.safe_load(block)
        if "space" in given:
            sweep = SweepConfig.model_validate(with_objectives(parse_yaml(block))[0])
            assert not parse_space(sweep.space)[1]
            continue
        given = {key: value for key, value in given.items() if key not in LAYER_KEYS}
        load_config({"task": "task.py:MyTask", "global_batch": 64, "epochs": 1, **given})


def bash_blocks(page: Path) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [_with_any_diagnosis(block) for block in blocks if not block.startswith("make")]


def _with_any_diagnosis(block: str) -> str:
    """The doctor's exit code tells what it found on this machine, which may be anything."""
    return re.sub(r"(?m)^(.*samestep check[^#\n]*)", r"\1 || true ", block)


WITH_COMMANDS = [page for page in PAGES if page.parent.name != "benchmarks" and bash_blocks(page)]
# What the commands of the other pages do has tests of its own in tests/cli, and in tests/distributed.
PAGES_IN_CI = [page for page in WITH_COMMANDS if page.name in ("README.md", "scan.md")]


@pytest.mark.requirement("003-T4-9", "000-P5-8", "003-T4-7")
@pytest.mark.parametrize("page", variations(WITH_COMMANDS, kept=PAGES_IN_CI), ids=lambda page: page.name)
def test_every_command_of_a_document_runs_as_written(tmp_path: Path, page: Path) -> None:
    """In one folder, in the order of reading, by interpreters that have torch imported already."""
    for folder in ("examples", "recipes"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    forked = {**environment(), "PATH": shell_path()}
    if page.name == "README.md":  # whose first command has a test of its own
        blocks = [re.sub(r"(?m)^samestep demo .*", "# tests/cli/test_demo.py", block) for block in bash_blocks(page)]
    else:
        made = [] if page.name == "tour.md" else ["samestep init mine"]  # which the tour makes
        blocks = [*made, *bash_blocks(page)]
    for block in blocks:
        _run_block(block, tmp_path, forked)


@pytest.mark.variation("test_every_command_of_a_document_runs_as_written: processes that start from nothing")
def test_a_readers_first_commands_run_as_they_are(tmp_path: Path) -> None:
    """The tour's, in processes that start from nothing."""
    cold = {**environment(), "PATH": shell_path(cold="a reader's first commands, as they are")}
    del cold["OMP_NUM_THREADS"]  # which a reader has not set
    _run_block(bash_blocks(ROOT / "docs" / "tour.md")[0], tmp_path, cold)
    _assert_same_weights(tmp_path / "runs" / "mine", tmp_path / "runs" / "two")


def _run_block(block: str, folder: Path, surroundings: Mapping[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder, env=surroundings, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"


def _assert_same_weights(one: Path, two: Path) -> None:
    """What the quickstart promises of its runs on one and on two ranks, with a hash seed each."""
    newest = [max((run / "checkpoints").glob("step-*")) for run in (one, two)]
    assert newest[0].name == newest[1].name
    states = [load_file(folder / "model.safetensors") for folder in newest]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
