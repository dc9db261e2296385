"""Every rule finds what was planted for it, and nothing that looks alike."""

from __future__ import annotations

import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

from samestep.check.code.rules import RULES, chosen_rules
from samestep.check.code.scan import Scan, scan
from tests.unit.check.code.planted import PLANTED

ROOT = Path(__file__).parents[4]


def scanned(path: Path) -> Scan:
    return scan([path], chosen_rules("", ""))


def marks(text: str) -> set[tuple[int, str]]:
    return {
        (number, rule)
        for number, line in enumerate(text.splitlines(), start=1)
        for rule in re.findall(r"# <- ([a-z-]+)", line)
    }


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_found_and_nothing_else(name: str, tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(PLANTED[name])
    found = {(one.line, one.rule) for one in scanned(tmp_path).findings}
    assert found == marks(PLANTED[name])


def test_every_rule_is_planted() -> None:
    planted = {rule for text in PLANTED.values() for _, rule in marks(text)}
    assert planted == set(RULES)


def test_every_rule_says_why_and_what_to_write() -> None:
    for rule in RULES.values():
        assert rule.name == rule.name.lower()
        assert len(rule.why) > 30, rule.name
        assert rule.instead, rule.name
        assert not rule.why.endswith("."), rule.name


@pytest.mark.requirement("000-P1-1")
def test_scripts_for_one_gpu_are_found_and_their_ports_are_clean() -> None:
    ports = ROOT / "examples" / "ports"
    for script in sorted(ports.glob("*/single.py")):
        rules = {one.rule for one in scanned(script).findings}
        assert {"first-gpu", "global-seed", "save-by-all", "print-by-all"} <= rules, script
    for script in sorted(ports.glob("*/samestep_port.py")):
        assert not scanned(script).findings, script


@pytest.mark.requirement("000-P1-1")
@pytest.mark.parametrize("folder", ["recipes", "examples"])
def test_our_own_tasks_are_clean(folder: str) -> None:
    others = ("single.py", "accelerate_port.py")
    found = scanned(ROOT / folder).findings
    assert not [one.place for one in found if not one.file.endswith(others)]


def test_libraries_that_do_not_train_raise_hardly_an_alarm() -> None:
    """Of installed packages, whatever their versions are."""
    folders = [_package("torch") / "optim", _package("torchmetrics") / "classification"]
    found = scan(folders, chosen_rules("", ""))
    assert found.files > 30
    assert len(found.findings) <= 2, [one.place for one in found.findings]


def _package(name: str) -> Path:
    """Where it is installed, without importing it."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def test_the_table_of_the_document_is_of_these_rules() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "scan_rules.py"))
    written = script["PAGE"].read_text(encoding="utf-8")
    assert script["with_table"](written) == written, "run: python scripts/scan_rules.py"
