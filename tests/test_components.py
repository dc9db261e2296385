"""Where Slurm, MPI and sshd are missing, the tests that need them are skipped and say why."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.installed import COMPONENTS, path_without_components
from tests.preloaded.client import ROOT, environment


def test_every_test_that_names_a_component_is_skipped_without_it(tmp_path: Path) -> None:
    """The others have no component on their PATH at any time: tests/cluster/conftest.py."""
    if all(shutil.which(name) is None for name in COMPONENTS):
        pytest.skip("no component is installed here: the whole suite shows it")
    command = [sys.executable, "-m", "pytest", "-m", "components", "-rs", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/cluster"],
        cwd=ROOT,
        env={**environment(), "PATH": path_without_components(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert not re.search(r"\d+ (passed|failed|error)", done.stdout), done.stdout
    [skipped] = re.findall(r"(\d+) skipped", done.stdout)
    assert int(skipped) > 50
    assert "tests/cluster/install.sh installs them" in done.stdout
