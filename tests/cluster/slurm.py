"""A real Slurm on the hosts: munged and slurmctld on ctl, a slurmd on every other."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from samestep.launch.run.slurm import FINAL
from tests.cluster.daemons import Daemons
from tests.cluster.hosts import Hosts
from tests.cluster.runs import PATIENCE, interpreter
from tests.installed import missing_commands

# Short waits all over, so that tests need not wait: cred_expire=5 is the least Slurm takes, and
# the default of 120 s delays requeued jobs by as much.
_SLURM_CONF = """\
ClusterName=test
SlurmctldHost=ctl(10.77.0.1)
SlurmUser=root
FirstJobId={first_job}
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n/slurmd.pid
SlurmdLogFile={folder}/%n/slurmd.log
SlurmdSpoolDir={folder}/%n/spool
TmpFS={folder}/%n/tmp
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,bf_resolution=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmdTimeout=5
SlurmctldTimeout=30
InactiveLimit=0
KillWait=2
MinJobAge=300
CompleteWait=0
MessageTimeout=10
TCPTimeout=2
UnkillableStepTimeout=10
SlurmdDebug=verbose
SlurmctldDebug=verbose
GresTypes=gpu
NodeName=n[1-{count}] NodeAddr=10.77.0.[11-{last}] CPUs=4 Sockets=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=grace Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_impossible() -> str | None:
    """Why Slurm cannot run here, or None; checks only what it needs on top of hosts."""
    return missing_commands("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")


class Slurm(Daemons):
    """A Slurm whose nodes are the hosts, with 4 CPUs and 2 pretended GPUs each.

    Partitions: `main`, the default; `grace`, whose jobs get 10 s to leave; `high`, whose jobs
    make those of the others leave and be requeued.
    """

    def __init__(self, hosts: Hosts) -> None:
        super().__init__(hosts)
        self._folder = hosts.folder
        self.env: Mapping[str, str] = {"SLURM_CONF": str(self._folder / "slurm.conf")}
        self._first_job = 1

    def open(self) -> None:
        self._configure()
        self._start_all()
        self._wait_until_idle()
        self.hosts.repairs.append(self.repair)

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = PATIENCE,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on ctl as a user of this Slurm; see `Hosts.run`."""
        return self.hosts.run("ctl", argv, env={**self.env, **(env or {})}, cwd=cwd, timeout=timeout)

    def submit(self, script: Path, *options: str) -> str:
        """Submit a script by sbatch, from its own folder; returns the job's id."""
        answer = self.run(["sbatch", "--parsable", *options, script], cwd=script.parent)
        if answer.returncode:
            raise RuntimeError(f"sbatch refuses {script}: {answer.stderr.strip()}")
        return answer.stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        """What scontrol shows of a job; name a task of an array as ID_INDEX."""
        answer = self.run(["scontrol", "show", "job", "-o", job])
        if answer.returncode:
            raise RuntimeError(f"scontrol knows no job {job}: {answer.stderr.strip()}")
        first = answer.stdout.splitlines()[0]
        # A value may hold blanks and equal signs; the next key starts with a capital letter.
        return dict(re.findall(r"(?:^| )([A-Z][\w:/]*)=(.*?)(?= [A-Z][\w:/]*=| *$)", first))

    def state(self, job: str) -> str:
        """The state of a job, as PENDING, RUNNING or COMPLETED."""
        return self.show(job)["JobState"]

    def run_script(self, folder: Path, *words: str | Path, **variables: str) -> tuple[str, str]:
        """Submit a script with the preloaded interpreter first on PATH: the state it ends in, and its output."""
        path = os.pathsep.join([str(interpreter[0].parent), os.environ["PATH"]])
        argv = ["sbatch", "--parsable", "--output=out.txt", *words]
        done = self.run(argv, env={**variables, "PATH": path}, cwd=folder)
        assert done.returncode == 0, done.stderr
        return self.wait(done.stdout.strip()), (folder / "out.txt").read_text()

    def wait(self, job: str, *states: str, timeout: float = PATIENCE) -> str:
        """Wait until a job is in one of the states, by default until it has ended."""
        wanted = states or tuple(FINAL)
        deadline = time.monotonic() + timeout
        while (state := self.state(job)) not in wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"job {job} is {state} after {timeout} s, not {' or '.join(wanted)}:\n"
                    f"{self.run(['scontrol', 'show', 'job', job]).stdout}{self._log_tail()}"
                )
            time.sleep(0.1)
        return state

    def restart_node(self, host: str) -> None:
        """Start slurmd on a host, after a boot or in place of the one that runs."""
        for name in ("spool", "tmp"):
            (self._folder / host / name).mkdir(exist_ok=True)
        self._start(host, host, ["slurmd", "-D", "-N", host])

    def repair(self) -> None:
        """Cancel all jobs and have every node idle again, for the next test."""
        dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
        if "munged" in dead or "slurmctld" in dead:
            self._start_all()
        else:
            for host in dead:
                self.restart_node(host)
        self.run(["scancel", "--user=root"])
        self._wait_until_idle()

    def _start_all(self) -> None:
        count = len(self.hosts.names)
        text = _SLURM_CONF.format(folder=self._folder, count=count, last=10 + count, first_job=self._first_job)
        (self._folder / "slurm.conf").write_text(text)
        # A slurmctld that was killed may give an id again, and a slurmd refuses one it has seen.
        self._first_job += 1000
        self._start_munged()
        self._start_slurmctld()
        for host in self.hosts.names:
            self.restart_node(host)

    def _configure(self) -> None:
        for name in ("state", "munge"):
            (self._folder / name).mkdir()
        key = self._folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for index in range(2):  # Slurm hands out any device as a GPU, but no plain file
            (self._folder / f"gpu{index}").symlink_to("/dev/null")
        (self._folder / "gres.conf").write_text(f"Name=gpu File={self._folder}/gpu[0-1]\n")
        # Left to itself, slurmd looks for the cgroups of the machine and fails.
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _start_munged(self) -> None:
        folder = self._folder / "munge"
        (folder / "socket").unlink(missing_ok=True)
        files = {"key-file": "key", "socket": "socket", "log-file": "log"}
        files |= {"pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={folder / file}" for option, file in files.items()]
        # All hosts use this one: they share the folder of its socket.
        self._start("munged", "ctl", ["munged", "--foreground", "--force", *options])
        self._wait_for("munged", folder / "log", (folder / "socket").exists)

    def _start_slurmctld(self) -> None:
        self._start("slurmctld", "ctl", ["slurmctld", "-D"])
        # A slurmd that finds no slurmctld tries again only a second later.
        answers = ["scontrol", "ping"]
        log = self._folder / "slurmctld.log"
        self._wait_for("slurmctld", log, lambda: "is UP" in self.run(answers).stdout)

    def _start(self, name: str, host: str, argv: Sequence[str]) -> None:
        if (old := self._daemons.get(name)) is not None:
            old.kill()
            old.wait()
        with (self._folder / f"{name}.err").open("w") as output:
            self._daemons[name] = self.hosts.start(
                host, argv, env=self.env, cwd=self._folder, stdout=output, stderr=output
            )
        self.hosts.daemons.add(self._daemons[name])

    def _wait_for(self, daemon: str, log: Path, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not ready():
            if self._daemons[daemon].poll() is not None or time.monotonic() > deadline:
                output = (self._folder / f"{daemon}.err").read_text()
                raise RuntimeError(f"{daemon} does not start: {output}{_tail(log)}")
            time.sleep(0.01)

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while busy := self._nodes_not_idle():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nodes do not become idle: {busy}\n{self._log_tail()}")
            for node, state in busy.items():
                if state.startswith(("down", "drain")):
                    self.run(["scontrol", "update", f"nodename={node}", "state=resume"])
            time.sleep(0.02)

    def _nodes_not_idle(self) -> dict[str, str]:
        answer = self.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%N %T"])
        if answer.returncode:
            return {"ctl": answer.stderr.strip()}
        states = dict(line.split() for line in answer.stdout.splitlines())
        seen = {node: states.get(node, "unknown") for node in self.hosts.names}
        return {node: state for node, state in seen.items() if state != "idle"}

    def _log_tail(self) -> str:
        return f"slurmctld's log ends:\n{_tail(self._folder / 'slurmctld.log')}"


def _tail(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-30:]) if log.exists() else ""
