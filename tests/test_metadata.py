"""What is written about the package besides its code: one version, one set of checks, valid files."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest
import yaml

import samestep

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")])


def test_the_version_is_a_literal_that_a_build_can_read_without_importing_torch() -> None:
    tree = ast.parse((ROOT / "src" / "samestep" / "version.py").read_text(encoding="utf-8"))
    assigned = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert assigned == [samestep.__version__]


def test_no_other_file_states_the_version() -> None:
    for name in ("pyproject.toml", "CITATION.cff", "constraints.txt"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"(?m)^version\s*[=:]\s*[\"']?\d|samestep==", text), name


def test_the_newest_dated_section_of_the_changelog_is_this_version() -> None:
    sections = re.findall(r"(?m)^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    released = [section for section in sections if section != "Unreleased"]
    assert re.fullmatch(re.escape(samestep.__version__) + r" - \d{4}-\d{2}-\d{2}", released[0])


def test_the_commit_hooks_are_the_checks_of_make_lint() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    entries = [hook["entry"] for repo in hooks["repos"] for hook in repo["hooks"]]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ("ruff check", "ruff format", "mypy --strict src"):
        assert f"$(BIN)/{command}" in makefile
        assert any(entry.startswith(f".venv/bin/{command}") for entry in entries)
    assert all(repo["repo"] == "local" for repo in hooks["repos"]), "hooks must need no network"


def test_the_citation_file_has_what_its_format_requires() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]
    assert citation["title"].startswith("samestep")
    assert citation["authors"] == [{"name": "The samestep authors"}]
    assert citation["license"] == "Apache-2.0"


@pytest.mark.requirement("003-X-2")
def test_the_oldest_supported_versions_are_stated_for_every_dependency() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "supported_versions.py"))
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"(?ms)^dependencies = \[\n(.*?)^\]", text)
    assert block is not None
    pins = script["lower_bounds"](re.findall(r'"(.*?)"', block[1]))
    assert any(pin.startswith("torch==2.") for pin in pins)
    with pytest.raises(ValueError, match="no lower bound"):
        script["lower_bounds"](["torch"])
    assert script["lower_bounds"](["matplotlib>=3.7; extra == 'plots'"]) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_documents_name_exist(page: Path) -> None:
    named = re.findall(
        r"(?<![\w/.-])(?:tests|scripts|hpc|benchmarks|examples|recipes|docs)/[\w/.-]+\.(?:py|sh|md|yaml|cpp)\b",
        page.read_text(encoding="utf-8"),
    )
    assert not [name for name in named if not (ROOT / name).exists()]


def _extras() -> dict[str, list[str]]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    found = re.findall(r"(?ms)^(\w+) = \[(.*?)\]$", section)
    return {name: re.findall(r'"([^"]*)"', packages) for name, packages in found}


def test_the_extra_all_is_every_extra_for_users() -> None:
    extras = _extras()
    inside = re.fullmatch(r"samestep\[(.*)\]", extras["all"][0])
    assert inside is not None
    assert len(extras["all"]) == 1
    # timm needs torchvision, whose builds must match torch's; both are options of one recipe.
    options = {"timm", "albumentations", "docs"}
    assert set(inside[1].split(",")) == extras.keys() - {"all", "dev"} - options


def test_the_guide_lists_every_extra() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    table = page.partition("| extra | for |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == _extras().keys()


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = ["numpy>=1.24", "onnx>=1.16; extra == 'onnx'", 'mlflow>=3.0 ; extra == "mlflow"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: stated)
    assert str(samestep.errors.MissingExtraError("export --to onnx", "onnx")) == (
        "export --to onnx needs packages that are not installed: pip install 'onnx>=1.16', or in a "
        "clone of samestep, pip install '.[onnx]'"
    )
    monkeypatch.setattr("importlib.metadata.requires", lambda name: None)
    assert str(samestep.errors.MissingExtraError("trackers.mlflow", "mlflow")).endswith(
        "not installed: in a clone of samestep, pip install '.[mlflow]'"
    )
