"""The launchers as text: their scripts to the letter, their plans, and every error message.

`SAMESTEP_UPDATE_GOLDEN=1 pytest tests/unit/launch/test_commands.py` rewrites the scripts in
tests/golden/: read the diff before you commit it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from samestep.cli import app
from samestep.config import Config, load_config
from samestep.errors import LaunchError, PlanError, UserError
from samestep.launch.commands.mpirun import ProgramCommand, flavour_of, mpirun_command
from samestep.launch.commands.rank_command import RankCommand
from samestep.launch.commands.size import Host, Size, parse_hosts
from samestep.launch.commands.slurm import directives, slurm_job, srun_command
from samestep.launch.commands.ssh import ssh_commands
from samestep.launch.commands.summary import more_processes_may_help, plan_rows
from samestep.launch.commands.torchrun import TorchrunCommand, torchrun_command
from samestep.launch.run.launches import Launch
from samestep.launch.run.mpirun import find_flavour
from samestep.launch.run.prepare import LaunchRequest, prepare

GOLDEN = Path(__file__).parents[2] / "golden"
GOOD = {"task": "task.py:Good", "epochs": 1, "global_batch": 8}
FILE = Path("run.yaml")


def config(*overrides: str, **values: Any) -> Config:
    return load_config({**GOOD, **values}, overrides)


# To the letter

OVERRIDES = ("seed=3", "params.title=two words")
ENVIRON = {"PATH": "/bin", "NCCL_DEBUG": "INFO", "HOME": "/home/a", "SAMESTEP_X": "1"}
EVERYTHING = {
    "partition": "gpu",
    "time": "12:00:00",
    "account": "proj",
    "mem": "64G",
    "cpus_per_task": 4,
    "gpus_per_node": 2,
    "array": "0-3%2",
    "warn_seconds": 300,
    "requeue": False,
    "extra": ["--qos=high", "--constraint=a100&nvlink", "--comment=two words"],
}


def everywhere(
    launch: dict[str, Any] | None = None, *, overrides: tuple[str, ...] = OVERRIDES, **section: Any
) -> RankCommand:
    """RankCommand with nothing of this machine in it."""
    values = {
        **GOOD,
        "name": "tiny",
        "distributed": {"threads_per_rank": 2, **section},
        "launch": {"python": "/opt/venv/bin/python", **(launch or {})},
    }
    return RankCommand(load_config(values), FILE, overrides, folder=Path("/data/my project"))


def by_mpi(flavour: Any, hosts: str, **more: Any) -> str:
    found = parse_hosts(hosts, 4) if hosts else ()
    at = {"cpus": 2, "as_root": False, **more}
    return mpirun_command(everywhere(), flavour, 4, found, "job", ENVIRON, **at).script()


def by_slurm(nodes: Size | None, restarts: int = 0, **options: Any) -> str:
    rank_command = everywhere({"slurm": {"gpus_per_node": 4, **options}})
    return slurm_job(rank_command, nodes, None, restarts).script()


ALLOCATION = {
    "SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_CPUS_ON_NODE": "8", "SLURM_MEM_PER_NODE": "16000",
    "SLURM_CPUS_PER_TASK": "2", "SLURM_GPUS_ON_NODE": "4",
}  # fmt: skip


def by_step(environ: dict[str, str], nproc: int | None = 2, **options: Any) -> str:
    """The line of srun's options in a script."""
    rank_command = everywhere({"slurm": options}, device=options.pop("device", "auto"))
    return srun_command(rank_command, Size(2, 2), nproc, "job", environ).script()


def everything() -> str:
    around = {
        "slurm": EVERYTHING,
        "modules": ["cuda/12.4", "openmpi"],
        "environment": {"NCCL_DEBUG": "INFO", "DATA": "/data/it's here"},
        "before": ["source /opt/env.sh", "ulimit -n 4096"],
    }
    overrides = ("seed={array}", "params.title=two words")
    rank_command = everywhere(around, overrides=overrides)
    return slurm_job(replace(rank_command, stop_after=5), Size(2, 2), None).script()


def here(rank_command: RankCommand, **more: Any) -> str:
    return torchrun_command(rank_command, 4, **more).script()


SCRIPTS: dict[str, Callable[[], str]] = {
    "torchrun_one_machine": lambda: here(everywhere()),
    "torchrun_restarts": lambda: here(everywhere(), max_restarts=2),
    "torch_distributed_launch": lambda: here(everywhere(launch_method="torch.distributed.launch")),
    "torchrun_numbered_nodes": lambda: here(everywhere(), nodes=Size(2, 2), node_rank=1, rendezvous="n0:29500"),
    "torchrun_elastic_nodes": lambda: here(everywhere(), nodes=Size(1, 2), rendezvous="n0:29500", max_restarts=3),
    "mpirun_openmpi_here": lambda: by_mpi("openmpi", "", as_root=True),
    "mpirun_openmpi_hosts": lambda: by_mpi("openmpi", "a:2,b:2"),
    "mpirun_hydra_here": lambda: by_mpi("hydra", ""),
    "mpirun_hydra_hosts": lambda: by_mpi("hydra", "a:2,b:2"),
    "slurm_srun": lambda: by_slurm(Size(2, 2)),
    "slurm_torchrun": lambda: by_slurm(Size(1, 2), 3, style="torchrun", cpus_per_task=4),
    "slurm_mpirun": lambda: by_slurm(Size(2, 2), style="mpirun"),
    "slurm_everything": everything,
    "srun_in_an_allocation": lambda: by_step(ALLOCATION),
    "ssh": lambda: ssh_commands(everywhere(), parse_hosts("a:4,b:2", None), "job").script(),
    "ssh_surrounded": lambda: ssh_commands(
        everywhere(
            {"ssh": "ssh -p 2222", "modules": ["cuda"], "environment": {"A": "it's"}, "before": ["ulimit -n 4096"]}
        ),
        parse_hosts("a,b", None),
        "job",
    ).script(),
}


@pytest.mark.requirement("004-3.1-2", "003-T3-7", "004-SL-1")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_the_same_to_the_letter(name: str) -> None:
    path, script = GOLDEN / f"{name}.sh", SCRIPTS[name]()
    if os.environ.get("SAMESTEP_UPDATE_GOLDEN") == "1":
        path.write_text(script, encoding="utf-8")
    assert script == path.read_text(encoding="utf-8")
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_script_in_the_folder_is_compared() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.sh" for name in SCRIPTS}


def test_shellcheck_has_no_doubt_about_any_script(tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (Debian: apt install shellcheck)")
    paths = [tmp_path / f"{name}.sh" for name in SCRIPTS]
    for path in paths:
        path.write_text(SCRIPTS[path.stem]())
    done = subprocess.run(
        ["shellcheck", "--severity=warning", "--norc", *map(str, paths)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_ranks_of_torch_distributed_launch_get_their_number_as_it_gave_it() -> None:
    legacy = torchrun_command(everywhere(launch_method="torch.distributed.launch"), 2)
    assert legacy.rank_argv[-2:] == ("--launched", "--local-rank=${local_rank}")
    assert torchrun_command(everywhere(), 2).rank_argv[-1] == "--launched"


def test_without_a_warning_there_is_no_signal() -> None:
    found = directives(slurm_job(everywhere({"slurm": {"warn_seconds": None}}), None, 1))
    assert not [line for line in found if line.startswith("--signal")]


def test_the_ranks_of_a_job_are_the_options_or_the_gpus_or_the_configs() -> None:
    def ranks(nproc: int | None, gpus: int | None = None, **section: Any) -> int:
        rank_command = everywhere({"slurm": {"gpus_per_node": gpus}}, **section)
        return slurm_job(rank_command, None, nproc).world

    assert ranks(None) == 1
    assert ranks(4) == 4
    assert ranks(None, 2) == 2
    assert ranks(2, 2) == 2
    assert ranks(None, num_gpus_per_node=4) == 4
    assert ranks(None, 2, num_gpus_per_node=4) == 2
    assert ranks(None, num_gpus_per_node=2, num_nodes=3) == 6


def test_a_step_takes_its_share_of_the_allocation() -> None:
    assert "--cpus-per-task=2 --mem=8000M --gpus-per-node=2 " in by_step(ALLOCATION)
    own = by_step(ALLOCATION, 1, cpus_per_task=3, mem="2G", gpus_per_node=1)
    assert "--ntasks=2 --ntasks-per-node=1 --exact" in own
    assert "--cpus-per-task=3 --mem=2G --gpus-per-node=1 " in own
    assert "--cpus-per-task=2 --mem=8000M --gres=none " in by_step(ALLOCATION, device="cpu")
    bare = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}
    assert "--cpus-per-task=1 /opt/venv" in by_step(bare)
    with pytest.raises(LaunchError, match="--nodes is 2, but job 7 has 1 node"):
        by_step({**bare, "SLURM_NNODES": "1"})
    with pytest.raises(LaunchError, match="this is none: use salloc or sbatch first"):
        by_step({})


def test_variables_of_the_config_are_set_for_mpirun_and_only_named_on_its_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINE", "secret")
    rank_command = everywhere({"environment": {"TOKEN": "${MINE}", "MASTER_ADDR": "n9"}})
    hosts = parse_hosts("a:1,b:1", None)
    launch = mpirun_command(rank_command, "openmpi", 2, hosts, "job", {}, cpus=8, as_root=False)
    assert launch.variables["TOKEN"] == "secret"
    assert launch.variables["MASTER_ADDR"] == "n9", "the config wins"
    assert "secret" not in " ".join(launch.argv)
    named = [b for a, b in zip(launch.argv, launch.argv[1:], strict=False) if a == "-x"]
    assert {"TOKEN", "MASTER_ADDR"} <= set(named)


@pytest.mark.parametrize("world", [4, 9])
def test_openmpi_may_oversubscribe_cpus_only_where_it_does_not_know_the_hosts(world: int) -> None:
    def argv(hosts: str) -> tuple[str, ...]:
        found = parse_hosts(hosts, world) if hosts else ()
        rank_command = everywhere()
        return mpirun_command(rank_command, "openmpi", world, found, "j", {}, cpus=4, as_root=False).argv

    assert ("--oversubscribe" in argv("")) == (world > 4)
    assert "--oversubscribe" not in argv(f"a:{world}")


# How many, and where


@pytest.mark.parametrize(
    ("text", "nproc", "hosts"),
    [
        ("a:4,b:2", None, [Host("a", 4), Host("b", 2)]),
        ("a:4, b:2", 6, [Host("a", 4), Host("b", 2)]),
        ("a,b", 8, [Host("a", 4), Host("b", 4)]),
        ("a,b", None, [Host("a", None), Host("b", None)]),
        ("a:4,b", None, [Host("a", 4), Host("b", None)]),
        ("me@n-1.site.org:2", None, [Host("me@n-1.site.org", 2)]),
        ("10.0.0.1:2,10.0.0.2:2", None, [Host("10.0.0.1", 2), Host("10.0.0.2", 2)]),
        ("[fe80::1]:4,[fe80::2]:4", None, [Host("fe80::1", 4), Host("fe80::2", 4)]),
        ("fe80::ab,fe80::cd", 4, [Host("fe80::ab", 2), Host("fe80::cd", 2)]),
    ],
)
def test_hosts_are_read(text: str, nproc: int | None, hosts: list[Host]) -> None:
    assert list(parse_hosts(text, nproc)) == hosts


@pytest.mark.parametrize("text", ["fe80::1", "::1", "2001:db8::10,2001:db9::11"])
def test_the_end_of_an_address_is_not_taken_for_a_number_of_ranks(text: str) -> None:
    try:
        hosts = parse_hosts(text, None)
    except LaunchError:
        return
    assert [host.name for host in hosts] == text.split(",")


def test_the_ranks_meet_at_the_host_and_not_at_its_user() -> None:
    hosts = parse_hosts("me@n1:1,me@n2:1", None)
    remote = ssh_commands(everywhere(), hosts, "job").remote(1)
    assert "--master-addr n1 " in remote
    by_mpi = mpirun_command(everywhere(), "openmpi", 2, hosts, "job", {}, cpus=8, as_root=False)
    assert by_mpi.variables["MASTER_ADDR"] == "n1"


# Mistakes


def hosts(text: str, nproc: int | None = None) -> Callable[[Path], object]:
    return lambda folder: parse_hosts(text, nproc)


def requested(via: str, *overrides: str, **request: Any) -> Callable[[Path], Launch]:
    """By prepare(), as the command line does it."""
    for name in ("nproc", "nodes"):
        if name in request:
            request[name] = Size.parse(str(request[name]), f"--{name}")

    def make(folder: Path) -> object:
        loaded = config(*overrides, distributed={"launch_method": via})
        return prepare(RankCommand(loaded, FILE, overrides, folder=folder), LaunchRequest(**request))

    return make


def printing(text: str) -> Callable[[Path], object]:
    """An mpirun whose --version prints this."""

    def make(folder: Path) -> object:
        path = program(folder / "mpirun", f"echo '{text}'")
        return requested("mpirun", f"launch.mpirun={path}", nproc=2)(folder)

    return make


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


MPI_REFUSES = {
    "nodes": 2, "node_rank": 0, "master_addr": "n0", "master_port": 1, "rendezvous": "n0:1",
    "max_restarts": 1,
}  # fmt: skip
SLURM_REFUSES = {"node_rank": 0, "master_addr": "n0", "master_port": 1, "rendezvous": "n0:1", "hosts": "a:1"}
SSH_REFUSES = {k: v for k, v in MPI_REFUSES.items() if k != "master_port"}


def meaningless(via: str, options: dict[str, Any]) -> list[Any]:
    return [
        (f"{name} by {via}", requested(via, **{name: value}), LaunchError,
         [f"--{name.replace('_', '-')} means nothing with --via {via}: leave it out"])
        for name, value in options.items()
    ]  # fmt: skip


ADD_NODES = "is for several machines: add --nodes"
WRITE = "write a:4,b:4, or a,b beside --nproc"

MISTAKES = [
    # Hosts
    ("an option for a host", hosts("-oProxyCommand=x:1"), LaunchError,
     ["--hosts has '-oProxyCommand=x:1'", WRITE]),
    ("an option for a host, without ranks", hosts("a:1,-oProxyCommand=x"), LaunchError, [WRITE]),
    ("a host of two words", hosts("a b:1"), LaunchError, ["--hosts has 'a b:1'", WRITE]),
    ("a host that is a command", hosts("$(x):1"), LaunchError, ["--hosts has '$(x):1'", WRITE]),
    ("a host of two lines", hosts("a\nb:1"), LaunchError, [WRITE]),
    ("no name", hosts(":4"), LaunchError, ["--hosts has ':4'"]),
    ("a comma at the end", hosts("a:4,"), LaunchError, ["--hosts has ''", WRITE]),
    ("a word for ranks", hosts("a:x"), LaunchError, ["--hosts has 'a:x'", WRITE]),
    ("ranks below zero", hosts("a:-1"), LaunchError, ["--hosts has 'a:-1'", WRITE]),
    ("no ranks", hosts("a:4,b:0"), LaunchError,
     ["--hosts has 'b:0': a host takes from 1 to 1000000 ranks"]),
    ("a colon and no ranks", hosts("a:"), LaunchError, ["--hosts has 'a:': write a:4,b:4"]),
    ("a host twice", hosts("a:4,a:4"), LaunchError, ["--hosts is a:4,a:4: a host is named twice"]),
    ("hosts that share unevenly", hosts("a,b", 5), LaunchError,
     ["--nproc 5 cannot be shared evenly by 2 hosts", "as a:4,b:3"]),
    ("more hosts than ranks", hosts("a,b,c", 2), LaunchError, ["cannot be shared evenly"]),
    ("other ranks than requested", hosts("a:4,b:4", 6), LaunchError,
     ["--nproc is 6, but --hosts a:4,b:4 take 8 ranks"]),
    # Options that mean nothing
    *meaningless("mpirun", MPI_REFUSES),
    *meaningless("slurm", SLURM_REFUSES),
    *meaningless("srun", SLURM_REFUSES),
    *meaningless("ssh", SSH_REFUSES),
    *meaningless("torchrun", {"hosts": "a:1"}),
    *meaningless("torch.distributed.launch", {"hosts": "a:1"}),
    ("several by slurm", requested("slurm", hosts="a:1", rendezvous="n:1"), LaunchError,
     ["--rendezvous, --hosts means nothing with --via slurm"]),
    # mpirun
    ("mpirun without ranks", requested("mpirun"), LaunchError,
     ["mpirun must know the number of ranks: add --nproc, or --hosts a:4,b:4"]),
    ("mpirun on hosts without ranks", requested("mpirun", hosts="a,b"), LaunchError,
     ["mpirun must know the number of ranks"]),
    ("mpirun with a range", requested("mpirun", nproc="2:4"), LaunchError,
     ["--nproc is 2:4: mpirun starts a fixed number, so give one number"]),
    ("no mpirun", requested("mpirun", "launch.mpirun=no-such-mpirun", nproc=2), LaunchError,
     ["there is no no-such-mpirun here", "module load", "launch.mpirun", "--via ssh"]),
    ("an unknown mpirun", printing("acmerun 7\nmore"), LaunchError,
     ["neither OpenMPI's nor hydra's", "it prints 'acmerun 7'", "launch.mpirun"]),
    ("an mpirun that prints nothing", printing(""), LaunchError, ["it prints 'nothing'"]),
    ("mpirun against world_size", requested("mpirun", "distributed.world_size=4", nproc=2),
     LaunchError, ["distributed.world_size is 4 but mpirun is to start 2 ranks", "world_size: auto"]),
    ("mpirun with more ranks than lanes", requested("mpirun", nproc=9), PlanError,
     ["Start 8 ranks or fewer, or set lanes to 9 or more"]),
    # Slurm
    ("slurm against gpus", requested("slurm", "launch.slurm.gpus_per_node=4", nproc=2), LaunchError,
     ["--nproc is 2 but --gpus-per-node 4: one rank drives one GPU"]),
    ("slurm with a range of ranks", requested("slurm", nproc="2:4"), LaunchError,
     ["--nproc is 2:4: Slurm starts a fixed number"]),
    ("a range of nodes by srun", requested("slurm", nodes="1:2"), LaunchError,
     ["--nodes is 1:2: ranks of the style srun do not come and go, so give one number"]),
    ("a range of nodes by mpirun", requested("slurm", "launch.slurm.style=mpirun", nodes="1:2"),
     LaunchError, ["style mpirun do not come and go"]),
    ("restarts by srun", requested("slurm", max_restarts=2), LaunchError,
     ["--max-restarts is 2", "Slurm restarts the job", "style=torchrun"]),
    ("slurm with more ranks than lanes", requested("slurm", nodes=3, nproc=3), PlanError,
     ["Start 8 ranks or fewer, or set lanes to 9 or more"]),
    ("slurm against world_size", requested("slurm", "distributed.world_size=4", nproc=2),
     LaunchError, ["distributed.world_size is 4 but the job has 2 ranks"]),
    # ssh
    ("ssh without hosts", requested("ssh"), LaunchError,
     ["--via ssh must know the machines: add --hosts, such as --hosts a:4,b:4"]),
    ("ssh with a range", requested("ssh", hosts="a,b", nproc="2:4"), LaunchError,
     ["--nproc is 2:4: ssh starts a fixed number"]),
    ("ssh with more ranks than lanes", requested("ssh", hosts="a:8,b:1"), PlanError,
     ["Start 8 ranks or fewer"]),
    ("ssh against world_size", requested("ssh", "distributed.world_size=4", hosts="a:1,b:1"),
     LaunchError, ["distributed.world_size is 4 but --hosts take 2 ranks"]),
    # Machines by torchrun
    ("torchrun where enabled is false", requested("torchrun", "distributed.enabled=false", nproc=2), LaunchError,
     ["enabled is false but --nproc is 2"]),
    ("torchrun with more ranks than lanes", requested("torchrun", nproc=9), PlanError, ["Start 8 ranks or fewer"]),
    ("more ranks than lanes once all machines are there",
     requested("torchrun", nproc=5, nodes="1:2", rendezvous="n0:1"), PlanError, ["Start 8 ranks or fewer"]),
    ("a node beyond the nodes", requested("torchrun", nproc=2, nodes=2, node_rank=2, master_addr="n0"),
     LaunchError, ["--node-rank is 2: 2 nodes run from 0 to 1"]),
    ("a node and no address", requested("torchrun", nproc=2, nodes=2, node_rank=0), LaunchError,
     ["--node-rank is 0: add --master-addr, node 0's host"]),
    ("an address and no node", requested("torchrun", nproc=2, nodes=2, master_addr="n0"), LaunchError,
     ["--master-addr is for machines numbered manually: add --node-rank"]),
    ("a port and no node", requested("torchrun", nproc=2, nodes=2, master_port=1), LaunchError,
     ["add --node-rank"]),
    ("two places to meet",
     requested("torchrun", nproc=2, nodes=2, node_rank=0, master_addr="n0", rendezvous="n1:1"),
     LaunchError, ["--rendezvous and --master-addr both set the meeting point: keep one"]),
    ("a numbered node of one", requested("torchrun", nproc=2, node_rank=0, master_addr="n0"),
     LaunchError, [ADD_NODES]),
    ("a rendezvous of one", requested("torchrun", nproc=2, rendezvous="n0:1"), LaunchError,
     ["--rendezvous", ADD_NODES]),
    ("nodes that meet nowhere", requested("torchrun", nproc=2, nodes=2), LaunchError,
     ["no meeting point is given: add --rendezvous HOST:PORT, or --node-rank N"]),
    ("numbered nodes that come and go",
     requested("torchrun", nproc=2, nodes="1:2", node_rank=0, master_addr="n0"), LaunchError,
     ["--nodes is 1:2: with --node-rank the machines do not come and go"]),
    ("restarts of numbered nodes",
     requested("torchrun", nproc=2, nodes=2, node_rank=0, master_addr="n0", max_restarts=1),
     LaunchError, ["--max-restarts is 1 beside --node-rank", "give --rendezvous HOST:PORT instead"]),
    ("two ranges", requested("torchrun", nproc="1:2", nodes="1:2", rendezvous="n0:1"), LaunchError,
     ["give a range for one of them"]),
    ("a range without a restart", requested("torchrun", nproc="1:2"), LaunchError,
     ["no rank can be left out without a restart: add --max-restarts"]),
    ("a range against world_size",
     requested("torchrun", "distributed.world_size=2", nproc="1:2", max_restarts=1), LaunchError,
     ["distributed.world_size is 2 but the number of ranks may change", "world_size: auto"]),
    ("a range with a batch per rank",
     requested("torchrun", "global_batch=null", "batch_per_rank=4", nproc="1:2", max_restarts=1),
     LaunchError, ["batch_per_rank makes the run depend", "set global_batch instead"]),
    ("elastic nodes that never resume",
     requested("torchrun", "resume.checkpoint=never", nproc=2, nodes=2, rendezvous="n0:1"),
     LaunchError, ["resume: never would start from step 0 whenever a node joins or leaves"]),
    ("elastic nodes that begin again at the best",
     requested("torchrun", "resume.checkpoint=best", nproc=2, nodes=2, rendezvous="n0:1"),
     LaunchError, ["resume: best would start from its best step whenever a node joins or leaves"]),
    ("nodes against world_size",
     requested("torchrun", "distributed.world_size=2", nproc=2, nodes=2, rendezvous="n0:1"),
     LaunchError, ["world_size is 2 but --nproc is 2 and --nodes 2"]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a person's shell is, even if these tests run inside a Slurm job."""
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("make", "error", "fragments"), [pytest.param(*row, id=name) for name, *row in MISTAKES])
def test_a_mistake_names_the_fix(
    tmp_path: Path, make: Callable[[Path], object], error: type, fragments: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        make(tmp_path)
    assert caught.type is error
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_what_the_mistakes_vary_is_itself_right(tmp_path: Path) -> None:
    mpirun = f"launch.mpirun={program(tmp_path / 'mpirun', 'echo Open MPI')}"
    for request in (
        requested("mpirun", mpirun, nproc=2),
        requested("mpirun", mpirun, hosts="a:4,b:4"),
        requested("mpirun", mpirun, hosts="a,b", nproc=8),
        requested("mpirun", mpirun, "distributed.world_size=4"),
        requested("slurm", nodes=2, nproc=4),
        requested("slurm", "launch.slurm.gpus_per_node=4", nproc=4),
        requested("slurm", "launch.slurm.style=torchrun", nodes="1:2", max_restarts=3),
        requested("ssh", hosts="a:4,b:4", master_port=1234),
        requested("torchrun", nproc=2, nodes=2, node_rank=1, master_addr="n0", master_port=1),
        requested("torchrun", nproc=2, nodes="1:2", rendezvous="n0:1", max_restarts=1),
        requested("torchrun", nproc="1:2", max_restarts=1),
    ):
        launch = request(tmp_path)
        assert launch.script().startswith("#!/bin/bash\n")
        assert dict(launch.summary())["same"] == "bits"


@pytest.mark.requirement("003-T2-5")
def test_a_launcher_is_chosen_by_the_config_or_the_option(tmp_path: Path) -> None:
    static = requested("torchrun", nproc=2, nodes=2, node_rank=1, master_addr="n0")(tmp_path)
    assert isinstance(static, TorchrunCommand)
    assert static.rendezvous == "n0:29500", "torchrun's own port"
    path = program(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    by_mpi = requested("mpirun", f"launch.mpirun={path}", nproc=2)(tmp_path)
    assert isinstance(by_mpi, ProgramCommand)
    assert by_mpi.argv[:3] == (str(path), "-np", "2")


def test_agents_in_a_slurm_job_meet_on_its_first_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[3-4]")
    launch = requested("torchrun", nproc=2, nodes="1:2")(tmp_path)
    assert isinstance(launch, TorchrunCommand)
    host, _, port = launch.rendezvous.partition(":")
    assert host == "n3"
    assert 1024 < int(port) < 65536
    assert requested("torchrun", nproc=2, nodes="1:2")(tmp_path) == launch


def test_a_range_of_ranks_starts_the_most_and_knows_the_fewest() -> None:
    launch = torchrun_command(everywhere(), Size(2, 4), max_restarts=3)
    assert (launch.nproc, launch.min_nproc, launch.max_restarts) == (4, 2, 3)


# The same, as it is typed

CLI_MISTAKES = [
    ("slurm options without slurm", ["--partition", "gpu", "--time", "1:00"],
     ["--partition, --time is for Slurm, but the launcher is torchrun: add --via slurm"]),
    ("an array by mpirun", ["--via", "mpirun", "--nproc", "2", "--array", "0-3"],
     ["--array is for Slurm, but the launcher is mpirun"]),
    ("a style nobody knows", ["--via", "slurm", "launch.slurm.style=pbs"],
     ["launch.slurm.style", "you set 'pbs'", "one of srun, torchrun, mpirun"]),
    ("no gpus", ["--via", "slurm", "--gpus-per-node", "0"],
     ["launch.slurm.gpus_per_node", "at least 1"]),
    ("two lines for a partition", ["--via", "slurm", "--partition", "a\nb"],
     ["launch.slurm.partition"]),
    ("an empty account", ["--via", "slurm", 'launch.slurm.account=""'], ["launch.slurm.account"]),
    ("a task's number without an array", ["seed={array}", "--via", "slurm"],
     ["an override has {array}, but there is no --array"]),
    ("a name for each task", ["name=x-{array}", "--via", "slurm", "--array", "0-3"],
     ["already have their own directories, 0 and so on"]),
    ("a directory for each task", ["run_dir=x/{array}", "--via", "slurm", "--array", "0-3"],
     ["already have their own directories"]),
    ("a range of nodes by srun", ["--via", "slurm", "--nodes", "1:2"], ["style srun"]),
    ("more ranks than lanes", ["--via", "slurm", "--nproc", "9"], ["Start 8 ranks or fewer"]),
    ("hosts for torchrun", ["--hosts", "a:1"], ["--hosts means nothing with --via torchrun"]),
    ("a node below zero", ["--node-rank", "-1"], ["node-rank"]),
    ("a word for ranks", ["--nproc", "all"], ["--nproc is 'all'"]),
    ("a launcher nobody knows", ["--via", "pbs"], ["pbs", "slurm"]),
    ("a folder to write to", ["--nproc", "2", "--write", "."], [". exists already"]),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("task: task.py:Good\nepochs: 1\nglobal_batch: 8\n")
    return tmp_path


@pytest.mark.parametrize(("arguments", "fragments"), [pytest.param(*row, id=name) for name, *row in CLI_MISTAKES])
def test_a_mistake_on_the_command_line_names_the_fix(folder: Path, arguments: list[str], fragments: list[str]) -> None:
    done = CliRunner().invoke(app, ["launch", "run.yaml", *arguments, "--print"])
    assert done.exit_code == 2, done.output
    for fragment in fragments:
        assert fragment in done.output
    assert "Traceback" not in done.output
    assert [path.name for path in folder.iterdir()] == ["run.yaml"]


@pytest.mark.requirement("004-3.2-5")
def test_options_of_slurm_become_lines_of_the_script(folder: Path) -> None:
    arguments = ["--via", "slurm", "--nodes", "2", "--gpus-per-node", "4", "--time", "12:00:00"]
    arguments += ["--partition", "gpu two", "--array", "0-3", "launch.slurm.extra=[--mail-user=me@x]"]
    done = CliRunner().invoke(app, ["launch", "run.yaml", "seed={array}", *arguments, "--print"])
    assert done.exit_code == 0, done.output
    for line in (
        "#SBATCH --nodes=2", "#SBATCH --gpus-per-node=4", "#SBATCH --time=12:00:00",
        '#SBATCH --partition="gpu two"', "#SBATCH --mail-user=me@x", "#SBATCH --array=0-3",
    ):  # fmt: skip
        assert f"\n{line}\n" in done.output
    assert "launch_method" not in done.output, "the ranks need not know how they are started"


# Which mpirun

VERSIONS = [
    ("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n",
     "openmpi"),
    ("mpirun (Open MPI) 5.0.3\n\nReport bugs to https://www.open-mpi.org/community/help/\n",
     "openmpi"),
    ("mpirun.real (OpenRTE) 2.1.1\n", "openmpi"),
    ("prterun (PRRTE) 3.0.5\n", "openmpi"),
    ("HYDRA build details:\n    Version:                                 4.0.2\n", "hydra"),
    ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307 (id: d82b3071db)\n"
     "Copyright 2003-2023, Intel Corporation.\n", "hydra"),
    ("mpiexec from MVAPICH 3.0\n", "hydra"),
    ("Version: mvapich2-2.3.7\n", "hydra"),
]  # fmt: skip


@pytest.mark.parametrize(("version", "flavour"), VERSIONS)
def test_an_mpirun_is_recognized_by_its_version(version: str, flavour: str) -> None:
    assert flavour_of(version) == flavour


@pytest.mark.parametrize(
    ("name", "flavour"), [("mpirun.openmpi", "openmpi"), ("mpiexec.hydra", "hydra"), ("mpirun.mpich", "hydra")]
)
def test_the_mpirun_of_this_machine_is_known(name: str, flavour: str) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name} here")
    assert find_flavour(name) == flavour


def test_an_mpirun_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.launch.run.mpirun._SECONDS_TO_ANSWER", 0.2)
    with pytest.raises(LaunchError, match="--version does not answer"):
        find_flavour(str(program(tmp_path / "mpirun", "exec sleep 20")))


def test_an_mpirun_that_cannot_run_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mpirun"
    path.write_text("#!/no/such/shell\n")
    path.chmod(0o755)
    with pytest.raises(LaunchError, match=r"does not answer: .*No such file"):
        find_flavour(str(path))


# What a launch amounts to


def test_a_plan_shows_how_the_lanes_are_shared() -> None:
    rows = dict(plan_rows(config("lanes=8"), 4, 2, 3))
    assert rows == {
        "run directory": Path("runs/run"),
        "machines": 2,
        "ranks": 4,
        "lanes": "8: 2 for each rank",
        "batch": "8 samples a step, 1 a lane",
        "threads for each rank": 3,
        "threads in all": 12,
        "same": "bits",
    }


def test_a_plan_shows_if_some_ranks_have_more_lanes() -> None:
    assert dict(plan_rows(config(), 3, 1, 1))["lanes"] == "8: 2 to 3 for each rank"
    weighed = config("distributed.lane_weights=[3, 1]")
    assert dict(plan_rows(weighed, 2, 1, 1))["lanes"] == "8: 2 to 6 for each rank"


def test_a_plan_does_not_guess_what_the_machines_decide() -> None:
    rows = dict(plan_rows(config(), None, 2, None))
    assert rows["ranks"] == "one for each GPU"
    assert rows["lanes"] == 8
    assert rows["batch"] == "8 samples a step, 1 a lane"
    share = "each rank's share of its machine's CPUs"
    assert rows["threads for each rank"] == f"1 on CPUs; beside a GPU {share}"
    assert dict(plan_rows(config("same=rounding"), None, 2, None))["threads for each rank"] == share
    assert "threads in all" not in rows
    by_rank = config("global_batch=null", "batch_per_rank=4")
    assert not {"lanes", "batch"} & dict(plan_rows(by_rank, None, 2, None)).keys()
    assert dict(plan_rows(by_rank, 3, 2, None))["batch"] == "12 samples a step, 4 a lane"


def test_the_threads_of_the_config_win_in_a_plan() -> None:
    rows = dict(plan_rows(config("distributed.threads_per_rank=5"), 2, 1, 1))
    assert rows["threads for each rank"] == 5
    assert rows["threads in all"] == 10


@pytest.mark.parametrize(
    ("threads", "lanes", "ranks"), [(16, 8, 8), (8, 8, 4), (7, 8, 2), (4, 8, 2), (12, 6, 6), (64, 8, 8), (6, 3, 3)]
)
def test_more_processes_are_offered_where_they_share_lanes_and_threads(threads: int, lanes: int, ranks: int) -> None:
    loaded = config(f"lanes={lanes}", f"global_batch={lanes}", "same=rounding")
    hint = more_processes_may_help(loaded, 1, threads, threads, on_gpu=False)
    assert f"One process computes with {threads} threads" in hint
    assert hint.endswith(f"samestep launch --nproc {ranks}")


@pytest.mark.parametrize(
    ("world", "threads", "on_gpu", "lanes"),
    [(2, 16, False, 8), (1, 16, True, 8), (1, 3, False, 8), (1, 1, False, 8), (1, 16, False, 1), (1, 8, False, 7)],
)
def test_more_processes_are_not_offered_in_vain(world: int, threads: int, on_gpu: bool, lanes: int) -> None:
    loaded = config(f"lanes={lanes}", f"global_batch={lanes}", "same=rounding")
    assert more_processes_may_help(loaded, world, threads, threads, on_gpu) == ""


# A login node: no torch, and nothing of it is missed

WITHOUT_TORCH = """
import sys
for name in ("torch", "torchmetrics", "torch.distributed"):
    sys.modules[name] = None
from samestep.cli import main
sys.argv[0] = "samestep"
main()
"""


def without_torch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


@pytest.fixture
def login_node(folder: Path) -> Path:
    (folder / "bin").mkdir()
    program(folder / "bin" / "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    program(folder / "bin" / "scontrol", "echo JobId=12 JobState=RUNNING Reason=None NodeList=n1")
    return folder


def test_torch_is_really_missing_there(login_node: Path) -> None:
    done = without_torch(login_node, "train", "run.yaml")
    assert done.returncode != 0
    assert "torch" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--via", "slurm", "--nodes", "2", "--gpus-per-node", "4"], ["#SBATCH --nodes=2", "srun"]),
        (["--via", "ssh", "--hosts", "a:2,b:2"], ["ssh -- a", "--node-rank 1"]),
        (["--via", "mpirun", "--nproc", "2"], ["exec mpirun -np 2"]),
        (["--nproc", "2"], ["torch.distributed.run --standalone --nproc-per-node=2"]),
    ],
)
def test_a_login_node_shows_what_would_be_started(login_node: Path, arguments: list[str], fragments: list[str]) -> None:
    done = without_torch(login_node, "launch", "run.yaml", *arguments, "--print")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash\n"), "the plan is beside the script"
    assert "run directory" in done.stderr
    for fragment in fragments:
        assert fragment in done.stdout


def test_a_login_node_writes_what_it_shows(login_node: Path) -> None:
    arguments = ["launch", "run.yaml", "--via", "slurm", "--print", "--write", "job.sh"]
    done = without_torch(login_node, *arguments)
    assert done.returncode == 0, done.stderr
    path = login_node / "job.sh"
    assert path.read_text() == done.stdout
    assert os.access(path, os.X_OK)
    assert "wrote job.sh" in done.stderr


def test_a_login_node_checks_a_config(login_node: Path) -> None:
    missing = without_torch(login_node, "check", "run.yaml")
    assert missing.returncode == 2
    assert "task.py cannot be read: No such file" in missing.stderr
    (login_node / "task.py").write_text("class Other: ...\n")
    other = without_torch(login_node, "check", "run.yaml")
    assert other.returncode == 2
    assert "it has Other" in other.stderr
    name = load_config(login_node / "run.yaml").task.rpartition(":")[2]
    (login_node / "task.py").write_text(f"raise SystemExit\nclass {name}: ...\n")
    done = without_torch(login_node, "check", "run.yaml")
    assert done.returncode == 0, done.stderr
    wrong = without_torch(login_node, "check", "run.yaml", "epochs=0")
    assert wrong.returncode == 2
    assert "epochs" in wrong.stderr


def test_a_login_node_knows_the_state_of_a_job(login_node: Path) -> None:
    folder = login_node / "runs" / "run" / "slurm"
    folder.mkdir(parents=True)
    (folder / "jobs.jsonl").write_text('{"job": "12", "when": 1.0, "script": "s", "array": false}\n')
    done = without_torch(login_node, "show", "runs/run")
    assert done.returncode == 75, done.stderr
    assert "RUNNING" in done.stdout
