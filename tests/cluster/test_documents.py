"""The commands of the documentation that need other machines, run on the cluster as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.runs import PATIENCE, ROOT, by_rsh, interpreter
from tests.cluster.slurm import Slurm
from tests.cluster.sshd import Sshd
from tests.variations import variations

PAGES = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("launch.md", "sweeps.md"))


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```bash {kind}\n(.*?)```", PAGES, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, sshd: Sshd) -> Path:
    """A working directory with the starter's files, and an ssh that knows the hosts."""
    samestep = Path(sys.executable).parent / "samestep"
    subprocess.run([samestep, "init", "mine"], cwd=tmp_path, check=True, capture_output=True)
    with (tmp_path / "mine" / "config.yaml").open("a", encoding="utf-8") as config:
        config.write(f"launch: {{python: {interpreter[0]}}}\n")
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {sshd.config} "$@"\n')
    ssh.chmod(0o755)
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    path = [folder / "bin", interpreter[0].parent, Path(sys.executable).parent, os.environ["PATH"]]
    return {"PATH": os.pathsep.join(map(str, path)), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}


@pytest.mark.requirement("004-TS-1", "004-7.1-2")
@pytest.mark.parametrize("block", variations(blocks("cluster"), kept=blocks("cluster")[:3]))
@pytest.mark.needs("mpirun")
def test_a_command_runs_from_the_first_machine_as_written(slurm: Slurm, folder: Path, block: str) -> None:
    done = slurm.hosts.run(
        "ctl", ["bash", "-euo", "pipefail", "-c", block],
        env={**environment(folder), **slurm.env, **by_rsh(slurm.hosts)},
        cwd=folder, light=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("block", variations(blocks("hosts"), kept=blocks("hosts")[:1]))
def test_commands_run_on_each_machine_as_written(hosts: Hosts, folder: Path, block: str) -> None:
    lines = re.findall(r"(.*\S)\s+# on (\w+)\n", block)
    assert len(lines) == len(block.splitlines()) == 2
    started = [
        hosts.start(
            host, ["bash", "-c", command], cwd=folder,
            env={**environment(folder), "SAMESTEP_SECRET": "of tests, and no secret at all"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for command, host in lines
    ]  # fmt: skip
    output = [process.communicate(timeout=PATIENCE)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], output


def test_there_are_such_commands() -> None:
    assert len(blocks("cluster")) >= 5
    assert len(blocks("hosts")) == 2
