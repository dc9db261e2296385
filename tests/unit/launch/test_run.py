"""Running a launch: Slurm's programs, mpirun and signals, each by a stand-in."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from samestep.cli import app
from samestep.config import load_config
from samestep.distributed.signals import SignalForwarder
from samestep.errors import LaunchError, RankFailed, RunDirError, Stopped
from samestep.launch.commands.mpirun import Flavour, ProgramCommand, mpirun_command
from samestep.launch.commands.rank_command import RankCommand
from samestep.launch.commands.size import parse_hosts
from samestep.launch.commands.slurm import SlurmJob, slurm_job
from samestep.launch.commands.ssh import SshCommands, ssh_commands
from samestep.launch.run import slurm as slurm_jobs
from samestep.launch.run.launches import start
from samestep.launch.run.mpirun import run_mpirun
from samestep.launch.run.slurm import Submitted, follow_job, jobs_of, logs_of, newest_job, state_of, submit
from samestep.launch.run.ssh import check_hosts, run_over_ssh
from tests.cli.processes import is_alive, wait_for

GOOD = {"task": "task.py:Good", "epochs": 1, "global_batch": 8, "name": "tiny"}


def rank_command(folder: Path, **launch: Any) -> RankCommand:
    return RankCommand(load_config({**GOOD, "launch": launch}), Path("run.yaml"), folder=folder)


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


# Slurm

SCONTROL = """
echo "$0 $*" >> "{root}/calls"
[ -e "{root}/answers" ] || {{ echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }}
head -n 1 "{root}/answers" | tr '|' '\\n'
[ "$(wc -l < "{root}/answers")" -eq 1 ] || sed -i 1d "{root}/answers"
"""


def shown(state: str, job: str = "12", **more: str) -> str:
    """A line of `scontrol show job --oneliner`, as Slurm 22.05 writes it, but for its length."""
    fields = {
        "JobId": job, "JobName": "tiny", "UserId": "me(1000)", "Priority": "4294901757",
        "JobState": state, "Reason": "None", "Dependency": "(null)", "Requeue": "1", "Restarts": "0",
        "BatchFlag": "1", "ExitCode": "0:0", "RunTime": "00:00:03", "TimeLimit": "UNLIMITED",
        "AllocNode:Sid": "login:77", "ReqNodeList": "(null)", "ExcNodeList": "(null)",
        "NodeList": "n[1-2]", "BatchHost": "n1", "Command": "/x/job.sh", "Power": "", **more,
    }  # fmt: skip
    return " ".join(f"{key}={value}" for key, value in fields.items())


@dataclass
class Cluster:
    """Slurm's programs, which answer what the test wants."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "runs" / "tiny"

    def answers(self, *lines: str) -> None:
        """One after the other; the last one from then on."""
        (self.root / "answers").write_text("".join(f"{line}\n" for line in lines))

    def forgets(self) -> None:
        (self.root / "answers").unlink()

    def job(self, **options: Any) -> SlurmJob:
        return slurm_job(rank_command(self.root, python="/py", slurm=options), None, 2)

    def writes(self, text: str, name: str = "12.out") -> None:
        with (self.run / "slurm" / name).open("a") as file:
            file.write(text)

    def calls_of(self, name: str) -> list[str]:
        path = self.root / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [line.split(" ", 1) for line in lines]
        return [rest for who, rest in found if who == str(self.root / "bin" / name)]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    note = f'echo "$0 $*" >> "{tmp_path}/calls"'
    program(tmp_path / "bin" / "sbatch", f"{note}; echo '12;cluster'")
    program(tmp_path / "bin" / "scancel", note)
    program(tmp_path / "bin" / "scontrol", SCONTROL.format(root=tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return Cluster(tmp_path)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that passes only by sleeping."""
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        assert sum(naps) < 1000, "it would follow forever"

    monkeypatch.setattr(slurm_jobs, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: sum(naps), time=lambda: 1.0))
    return naps


def test_a_job_is_submitted_by_its_script_and_remembered(cluster: Cluster) -> None:
    job = cluster.job()
    found = submit(job)
    script = cluster.run / "slurm" / "job.sh"
    assert found.job == "12"
    assert found.script == str(script)
    assert not found.array
    assert script.read_text() == job.script()
    assert cluster.calls_of("sbatch") == [f"--parsable {script}"]
    [line] = (cluster.run / "slurm" / "jobs.jsonl").read_text().splitlines()
    assert json.loads(line)["job"] == "12"
    assert jobs_of(cluster.run) == [found]


def test_two_jobs_never_write_to_one_run(cluster: Cluster) -> None:
    submit(cluster.job())
    for state in ("RUNNING", "PENDING", "COMPLETING", "SUSPENDED", "REQUEUED"):
        cluster.answers(shown(state))
        with pytest.raises(LaunchError, match=f"has job 12, which is {state}: two jobs") as caught:
            submit(cluster.job())
        assert f"samestep stop {cluster.run}" in str(caught.value)
    assert len(cluster.calls_of("sbatch")) == 1


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"])
def test_a_run_whose_job_has_ended_may_be_submitted_again(cluster: Cluster, state: str) -> None:
    submit(cluster.job())
    cluster.answers(shown(state))
    submit(cluster.job())
    assert len(jobs_of(cluster.run)) == 2
    assert newest_job(cluster.run) == jobs_of(cluster.run)[1]


def test_a_run_whose_job_is_forgotten_may_be_submitted_again(cluster: Cluster) -> None:
    submit(cluster.job())
    assert state_of("12").state == "UNKNOWN"
    submit(cluster.job())
    assert len(jobs_of(cluster.run)) == 2


def test_a_job_that_sbatch_refuses_is_not_remembered(cluster: Cluster) -> None:
    program(cluster.root / "bin" / "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(LaunchError, match="sbatch failed: sbatch: error: invalid partition"):
        submit(cluster.job())
    assert jobs_of(cluster.run) == []


def test_a_folder_that_cannot_be_written_is_named(cluster: Cluster) -> None:
    (cluster.root / "runs").write_text("a file")
    with pytest.raises(RunDirError, match=r"runs/tiny cannot be written: Not a directory"):
        submit(cluster.job())
    assert cluster.calls_of("sbatch") == []


def test_a_job_is_not_put_into_a_users_directory(cluster: Cluster) -> None:
    cluster.run.mkdir(parents=True)
    (cluster.run / "config.json").write_text("mine")
    with pytest.raises(RunDirError, match="is not a run's directory"):
        submit(cluster.job())
    assert [path.name for path in cluster.run.iterdir()] == ["config.json"]
    assert cluster.calls_of("sbatch") == []


def test_a_secret_reaches_a_job_by_its_environment(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_S3CR3T")
    program(cluster.root / "bin" / "sbatch", f'echo "$HF_TOKEN" > "{cluster.root}/told"; echo 12')
    command = rank_command(cluster.root, environment={"HF_TOKEN": "${HF_TOKEN}"})
    submit(slurm_job(command, None, 2))
    script = cluster.run / "slurm" / "job.sh"
    assert "hf_S3CR3T" not in script.read_text()
    assert script.stat().st_mode & 0o777 == 0o600
    assert (cluster.root / "told").read_text() == "hf_S3CR3T\n"


def test_a_state_is_read_from_the_line_of_the_job(cluster: Cluster) -> None:
    cluster.answers(shown("RUNNING", Restarts="2", RunTime="1-02:03:04"))
    state = state_of("12")
    assert cluster.calls_of("scontrol") == ["show job --oneliner 12"]
    assert (state.job, state.state, state.reason, state.nodes) == ("12", "RUNNING", "", "n[1-2]")
    assert (state.elapsed, state.restarts, state.exit_code) == ("1-02:03:04", "2", "0:0")
    cluster.answers(shown("PENDING", NodeList="(null)", Reason="Resources"))
    assert (state_of("12").nodes, state_of("12").reason) == ("", "Resources")


def test_an_array_ends_with_its_last_task(cluster: Cluster) -> None:
    done, going = shown("COMPLETED", "12"), shown("RUNNING", "13", ArrayJobId="12")
    cluster.answers(f"{done}|{going}")
    assert state_of("12").state == "RUNNING"
    cluster.answers(f"{done}|{done}")
    assert state_of("12").state == "COMPLETED"


def test_an_array_has_failed_when_one_task_has(cluster: Cluster, slept: list[float]) -> None:
    failed = shown("FAILED", "13", ArrayJobId="12", ExitCode="3:0")
    job = submit(cluster.job(array="0-1"))
    cluster.answers(f"{shown('COMPLETED', '12')}|{failed}")
    with pytest.raises(RankFailed, match="FAILED"):
        follow_job(cluster.run, job, print, None)


def followed(cluster: Cluster, job: Submitted, *states: str) -> tuple[list[str], str]:
    """What a person sees who stays with a job of these states."""
    cluster.answers(*states)
    reported: list[str] = []
    output = io.StringIO()

    def report(line: str) -> None:
        reported.append(line.removeprefix("job 12: "))
        cluster.writes(f"line {len(reported)}\n")

    follow_job(cluster.run, job, report, output)
    return reported, output.getvalue()


PENDING = shown("PENDING", NodeList="(null)", Reason="Priority")
RUNNING = shown("RUNNING")


def test_following_shows_states_and_output_until_the_end(cluster: Cluster, slept: list[float]) -> None:
    job = submit(cluster.job())
    reported, output = followed(cluster, job, PENDING, PENDING, RUNNING, RUNNING, shown("COMPLETED"))
    assert reported == ["PENDING (Priority)", "RUNNING on n[1-2]", "COMPLETED on n[1-2]"]
    assert output == "line 1\nline 2\nline 3\n"


def test_following_shows_what_comes_after_the_end(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    job = submit(cluster.job())
    cluster.answers(shown("COMPLETED"))
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            cluster.writes("late lines\n")

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: sum(naps))
    monkeypatch.setattr(slurm_jobs, "time", clock)
    output = io.StringIO()
    follow_job(cluster.run, job, lambda line: None, output)
    assert output.getvalue() == "late lines\n"
    assert 1.0 < sum(naps) < 3.0


def test_a_requeue_does_not_end_following(cluster: Cluster, slept: list[float]) -> None:
    job = submit(cluster.job())
    states = [RUNNING, shown("FAILED", ExitCode="75:0"), PENDING, RUNNING, shown("COMPLETED")]
    reported, _ = followed(cluster, job, *states)
    assert [line.split()[0] for line in reported] == ["RUNNING", "FAILED", "PENDING", "RUNNING", "COMPLETED"]


@pytest.mark.parametrize(
    ("state", "exit_code", "code"),
    [
        ("FAILED", "1:0", 1), ("FAILED", "3:0", 3), ("FAILED", "7:0", 7), ("FAILED", "9:0", 1),
        ("CANCELLED", "0:15", 1), ("TIMEOUT", "0:0", 1), ("NODE_FAIL", "1:0", 1),
        ("OUT_OF_MEMORY", "0:125", 1), ("PREEMPTED", "0:15", 1),
    ],
)  # fmt: skip
def test_following_ends_as_the_job_did(
    cluster: Cluster, slept: list[float], state: str, exit_code: str, code: int
) -> None:
    job = submit(cluster.job())
    with pytest.raises(RankFailed) as caught:
        followed(cluster, job, RUNNING, shown(state, ExitCode=exit_code))
    assert caught.value.exit_code == code
    assert f"job 12 ended as {state} with exit code {exit_code}" in str(caught.value)
    assert str(cluster.run / "slurm" / "12.out") in str(caught.value)


def test_following_a_job_that_saved_and_stopped_is_reported_as_stopped(cluster: Cluster, slept: list[float]) -> None:
    job = submit(cluster.job())
    with pytest.raises(Stopped, match=r"job 12 was stopped \(FAILED\) and has saved"):
        followed(cluster, job, RUNNING, shown("FAILED", ExitCode="75:0"))


def followed_until_forgotten(cluster: Cluster, state: str) -> None:
    """Follow a job that Slurm forgets after this answer."""
    job = submit(cluster.job())
    cluster.answers(state)
    follow_job(cluster.run, job, lambda line: cluster.forgets() if "UNKNOWN" not in line else None, None)


def test_a_job_that_is_forgotten_after_its_end_is_known_by_its_last_state(cluster: Cluster, slept: list[float]) -> None:
    followed_until_forgotten(cluster, shown("COMPLETED"))
    assert len(cluster.calls_of("scontrol")) > 1, "its state was queried again"


def test_a_job_that_is_forgotten_while_it_ran_has_not_succeeded(cluster: Cluster, slept: list[float]) -> None:
    with pytest.raises(RankFailed, match="job 12 ended as UNKNOWN"):
        followed_until_forgotten(cluster, RUNNING)


@pytest.mark.parametrize("line", ["{half a", "[1, 2]", '{"unknown": 1}', "null"])
def test_a_damaged_list_of_jobs_is_an_error_that_names_the_fix(cluster: Cluster, line: str) -> None:
    submit(cluster.job())
    with (cluster.run / "slurm" / "jobs.jsonl").open("a") as file:
        file.write(line + "\n")
    for ask in (jobs_of, newest_job):
        with pytest.raises(LaunchError, match=r"jobs\.jsonl cannot be read: .*remove the file"):
            ask(cluster.run)
    with pytest.raises(LaunchError, match=r"jobs\.jsonl cannot be read"):
        submit(cluster.job())
    assert len(cluster.calls_of("sbatch")) == 1


def test_following_outlives_a_moment_in_which_slurm_is_busy(cluster: Cluster, slept: list[float]) -> None:
    job = submit(cluster.job())
    scontrol = cluster.root / "bin" / "scontrol"
    busy = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    answer = scontrol.read_text().replace(
        "\n[ -e", f'\nif [ "$(wc -l < "{cluster.root}/calls")" -eq 3 ]; then echo "{busy}" >&2; exit 1; fi\n[ -e', 1
    )
    scontrol.write_text(answer)
    reported, _ = followed(cluster, job, RUNNING, RUNNING, RUNNING, shown("COMPLETED"))
    assert reported[0].startswith("RUNNING")
    assert reported[-1].startswith("COMPLETED")


def test_a_character_that_is_written_in_two_halves_is_shown_whole(cluster: Cluster, slept: list[float]) -> None:
    job = submit(cluster.job())
    cluster.answers(RUNNING, shown("COMPLETED"))
    output, halves = io.StringIO(), ["ü".encode()[:1], "ü".encode()[1:]]

    def report(line: str) -> None:
        with (cluster.run / "slurm" / "12.out").open("ab") as file:
            file.write(halves.pop(0))

    follow_job(cluster.run, job, report, output)
    assert output.getvalue() == "ü"


def test_the_output_of_an_array_is_all_its_tasks(cluster: Cluster) -> None:
    job = submit(cluster.job(array="0-1"))
    assert job.array
    for name in ("12_0.out", "12_1.out", "12.out", "123_0.out"):
        cluster.writes("x", name)
    assert [path.name for path in logs_of(cluster.run, job)] == ["12_0.out", "12_1.out"]


def test_a_machine_without_slurm_is_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError) as caught:
        submit(slurm_job(rank_command(tmp_path), None, 2))
    assert "sbatch cannot be started here (No such file or directory)" in str(caught.value)
    assert "is this a machine of a Slurm cluster? --print shows the script" in str(caught.value)


def test_a_slurm_that_does_not_answer_is_not_waited_for(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(cluster.job())
    program(cluster.root / "bin" / "scontrol", "exec sleep 20")
    monkeypatch.setattr(slurm_jobs, "_SECONDS_TO_ANSWER", 0.2)
    with pytest.raises(LaunchError, match=r"scontrol did not answer within 0\.2 s"):
        submit(cluster.job())
    assert len(cluster.calls_of("sbatch")) == 1, "nobody knows whether the first job still runs"


def test_a_slurm_that_fails_is_quoted(cluster: Cluster) -> None:
    program(cluster.root / "bin" / "scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(LaunchError, match="scontrol failed: Unable to contact slurm controller"):
        state_of("12")
    program(cluster.root / "bin" / "scontrol", "exit 3")
    with pytest.raises(LaunchError, match="scontrol failed: exit code 3"):
        state_of("12")


def test_an_empty_answer_about_a_job_means_unknown(cluster: Cluster) -> None:
    program(cluster.root / "bin" / "scontrol", "exit 0")
    assert state_of("12").state == "UNKNOWN"


def test_starting_a_job_submits_it_and_leaves_it_alone(cluster: Cluster) -> None:
    reported: list[str] = []
    start(cluster.job(), reported.append)
    [line] = reported
    assert "submitted job 12" in line
    assert f"samestep show {cluster.run}" in line
    assert cluster.calls_of("scontrol") == []


def test_starting_a_job_can_stay_with_it(
    cluster: Cluster, slept: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.answers(RUNNING, shown("COMPLETED"))
    reported: list[str] = []

    def report(line: str) -> None:
        reported.append(line)
        if "RUNNING" in line:
            cluster.writes("a rank speaks\n")

    start(cluster.job(), report, follow=True)
    assert reported[-1] == "job 12: COMPLETED on n[1-2]"
    assert capsys.readouterr().out == "a rank speaks\n"


@pytest.mark.parametrize(("quiet", "cancelled"), [(True, ["12"]), (False, [])])
def test_an_interrupt_cancels_only_a_job_that_nobody_sees(
    cluster: Cluster, slept: list[float], quiet: bool, cancelled: list[str]
) -> None:
    cluster.answers(RUNNING)

    def interrupt(line: str) -> None:
        if "RUNNING" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(cluster.job(), interrupt, follow=True, quiet=quiet)
    assert cluster.calls_of("scancel") == cancelled


# The same, as it is typed


def typed(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.mark.parametrize("command", [["stop"], ["show", "--log"]])
def test_a_run_without_a_job_is_named(cluster: Cluster, command: list[str]) -> None:
    cluster.run.mkdir(parents=True, exist_ok=True)
    done = typed(*command, cluster.run)
    assert done.exit_code == 2
    assert "has no Slurm job: give the directory of a run" in done.output


def test_the_states_of_all_jobs_are_shown(cluster: Cluster) -> None:
    submit(cluster.job())
    cluster.answers(shown("FAILED", ExitCode="1:0"))
    submit(cluster.job())
    done = typed("show", cluster.run, "--json")
    assert done.exit_code == 1, done.output
    states = json.loads(done.output)["jobs"]
    assert [state["state"] for state in states] == ["FAILED", "FAILED"]
    assert states[0].keys() == {"job", "state", "reason", "nodes", "elapsed", "restarts", "exit_code"}
    table = typed("show", cluster.run).output
    assert "FAILED" in table
    assert "n[1-2]" in table, "a table that takes brackets for its own marks would lose them"


def test_a_job_is_cancelled_once(cluster: Cluster) -> None:
    submit(cluster.job())
    cluster.answers(RUNNING)
    done = typed("stop", cluster.run)
    assert done.exit_code == 0
    assert "job 12 is cancelled; it was RUNNING" in done.output
    assert cluster.calls_of("scancel") == ["12"]
    cluster.answers(shown("CANCELLED"))
    again = typed("stop", cluster.run)
    assert again.exit_code == 0
    assert "job 12 has already ended: CANCELLED" in again.output
    assert cluster.calls_of("scancel") == ["12"]


def test_what_a_job_wrote_is_shown(cluster: Cluster, slept: list[float]) -> None:
    submit(cluster.job())
    assert typed("show", "--log", cluster.run).output == ""
    cluster.writes("one\ntwo\n")
    assert typed("show", "--log", cluster.run).output == "one\ntwo\n"
    cluster.answers(shown("FAILED", ExitCode="3:0"))
    done = typed("show", "--log", cluster.run, "--follow")
    assert done.exit_code == 3
    assert "one\ntwo\n" in done.output
    assert "job 12 ended as FAILED" in done.output


# Signals

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture
def missed() -> Iterator[list[int]]:
    """Signals that nobody else took, instead of the end of the tests."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, frame: came.append(n)) for number in HANDLED}
    yield came
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    signal.raise_signal(number)


@pytest.mark.parametrize("number", HANDLED)
def test_the_first_signal_is_handed_on_once(missed: list[int], number: signal.Signals) -> None:
    stops: list[signal.Signals] = []
    ends: list[str] = []
    with SignalForwarder(stops.append, lambda: ends.append("end")) as signals:
        assert signals.received is None
        send(number)
        send(signal.SIGTERM)
        send(signal.SIGUSR1)
        assert signals.received == number
    assert stops == [number]
    assert ends == missed == []


def test_a_second_interrupt_ends_at_once(missed: list[int]) -> None:
    stops: list[signal.Signals] = []
    ends: list[str] = []
    with SignalForwarder(stops.append, lambda: ends.append("end")):
        send(signal.SIGTERM)
        send(signal.SIGINT)
        assert ends == []
        send(signal.SIGINT)
    assert stops == [signal.SIGTERM]
    assert ends == ["end"]
    assert missed == []


# mpirun


def mpirun(folder: Path, body: str, flavour: Flavour = "hydra", **launch: Any) -> ProgramCommand:
    path = program(folder / "bin" / "mpirun", body)
    where = rank_command(folder, mpirun=str(path), python="/py", **launch)
    return mpirun_command(where, flavour, 2, (), "job", {}, cpus=8, as_root=False)


def test_mpirun_runs_in_the_folder_with_its_variables(tmp_path: Path) -> None:
    body = 'printf "%s\\n" "$PWD" "$A" "$B" "$*" > printed; cat > input'
    launch = mpirun(tmp_path, body, environment={"A": "it's"})
    run_mpirun(launch, {**os.environ, "A": "lost", "B": "kept"})
    folder, a, b, arguments = (tmp_path / "printed").read_text().splitlines()
    assert (folder, a, b) == (str(tmp_path), "it's", "kept")
    assert arguments.split() == list(launch.argv[1:])
    assert (tmp_path / "input").read_text() == "", "a terminal is not for the ranks to read"


def test_mpirun_that_saved_and_stopped_is_reported_as_stopped(tmp_path: Path) -> None:
    with pytest.raises(Stopped, match="the ranks have saved and stopped"):
        run_mpirun(mpirun(tmp_path, "exit 75"), os.environ)


@pytest.mark.parametrize(
    ("body", "how", "code"),
    [
        ("exit 1", "exit code 1", 1), ("exit 3", "exit code 3", 3), ("exit 7", "exit code 7", 7),
        ("exit 42", "exit code 42", 1), ("kill -KILL $$", "SIGKILL", 1),
        ("kill -SEGV $$", "SIGSEGV", 1),
    ],
)  # fmt: skip
def test_mpirun_that_fails_is_reported_with_its_code(tmp_path: Path, body: str, how: str, code: int) -> None:
    with pytest.raises(RankFailed) as caught:
        run_mpirun(mpirun(tmp_path, body), os.environ)
    assert f"mpirun ended with {how}: the error of the rank that failed is above" in str(caught.value)
    assert "runs/tiny/logs" in str(caught.value)
    assert caught.value.exit_code == code


@pytest.mark.parametrize(
    ("setup", "skipped"), [({"before": ["ulimit -n 4096"]}, True), ({"modules": ["cuda"]}, True), ({}, False)]
)
def test_setup_lines_that_only_a_script_runs_are_reported(tmp_path: Path, setup: dict[str, Any], skipped: bool) -> None:
    reported: list[str] = []
    start(mpirun(tmp_path, "exit 0", **setup), reported.append)
    assert [line.split(" only apply")[0] for line in reported] == (
        ["launch.modules and launch.before"] if skipped else []
    )


def test_a_quiet_mpirun_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launch = mpirun(tmp_path, "echo out; echo err >&2")
    run_mpirun(launch, os.environ, quiet=True)
    assert capfd.readouterr() == ("", "")
    run_mpirun(launch, os.environ)
    assert capfd.readouterr() == ("out\n", "err\n")


def test_a_quiet_mpirun_that_fails_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    launch = mpirun(tmp_path, "seq 100; echo no route to n2 >&2; exit 3")
    with pytest.raises(RankFailed, match=r"exit code 3: .* is above$"):
        run_mpirun(launch, os.environ, quiet=True)
    shown = capfd.readouterr().err.splitlines()
    assert (shown[0], shown[-1]) == ("42", "no route to n2"), "the last 60 lines"


# Its traps are set before it signals us, and we are waiting for it by then.
SIGNALLED = """
for name in USR1 USR2 TERM INT HUP; do trap "echo $name >> got; {then}" $name; done
until [ -e waited-for ]; do sleep 0.02; done
{send}
n=0; while [ $n -lt 600 ]; do sleep 0.05; n=$((n+1)); done
exit 9
"""


@pytest.fixture
def waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An mpirun finds the file `waited-for` once its launcher waits for its end."""

    class Popen(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            (tmp_path / "waited-for").touch()
            return super().wait(timeout)

    monkeypatch.setattr("samestep.launch.run.mpirun.subprocess.Popen", Popen)


@pytest.mark.parametrize(
    ("flavour", "sent", "arrives"),
    [
        ("openmpi", "TERM", "USR2"), ("openmpi", "INT", "USR2"), ("openmpi", "HUP", "USR2"),
        ("openmpi", "USR1", "USR1"), ("openmpi", "USR2", "USR2"),
        ("hydra", "TERM", "TERM"), ("hydra", "INT", "TERM"), ("hydra", "HUP", "TERM"),
        ("hydra", "USR1", "USR1"), ("hydra", "USR2", "TERM"),
    ],
)  # fmt: skip
def test_mpirun_gets_the_signals_that_let_its_ranks_save(
    tmp_path: Path, missed: list[int], waits: None, flavour: Flavour, sent: str, arrives: str
) -> None:
    body = SIGNALLED.format(send=f"kill -{sent} $PPID", then="exit 75")
    with pytest.raises(Stopped):
        run_mpirun(mpirun(tmp_path, body, flavour), os.environ)
    assert (tmp_path / "got").read_text() == f"{arrives}\n"
    assert missed == []


@pytest.mark.parametrize("flavour", ["openmpi", "hydra"])
def test_a_second_interrupt_ends_mpirun(tmp_path: Path, missed: list[int], waits: None, flavour: Flavour) -> None:
    """One that would take its time, and does not end by the signal that lets its ranks save."""
    twice = "kill -INT $PPID; until [ -s got ]; do sleep 0.02; done; kill -INT $PPID"
    body = SIGNALLED.format(send=twice, then="[ $(wc -l < got) -lt 2 ] || exit 1")
    with pytest.raises(RankFailed, match=r"stopped by SIGINT, and .* before its ranks reported") as caught:
        run_mpirun(mpirun(tmp_path, body, flavour), os.environ)
    assert caught.value.exit_code == 128 + signal.SIGINT
    first = (tmp_path / "got").read_text().splitlines()[0]
    assert first == {"openmpi": "USR2", "hydra": "TERM"}[flavour]
    assert missed == []


RANK = """
trap 'echo got >> signalled' USR1 USR2 TERM
echo $$ >> ranks
if [ "${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}" = 0 ]; then
    while [ "$(wc -l < ranks)" -lt 2 ]; do sleep 0.05; done
    kill -INT {parent}
    until [ -s signalled ]; do sleep 0.02; done
    kill -INT {parent}
fi
n=0; while [ $n -lt 600 ]; do sleep 0.05; n=$((n+1)); done
"""


@pytest.mark.parametrize(
    ("name", "flavour"),
    [
        pytest.param("mpirun.openmpi", "openmpi", marks=pytest.mark.needs("mpirun.openmpi")),
        pytest.param("mpirun.mpich", "hydra", marks=pytest.mark.needs("mpirun.mpich")),
    ],
)
def test_a_second_interrupt_leaves_no_rank_behind(
    tmp_path: Path, missed: list[int], name: str, flavour: Flavour
) -> None:
    rank = program(tmp_path / "rank", RANK.format(parent=os.getpid()))
    where = rank_command(tmp_path, mpirun=name, python=str(rank))
    as_root = os.geteuid() == 0
    launch = mpirun_command(where, flavour, 2, (), "job", {}, cpus=1, as_root=as_root)
    with pytest.raises(RankFailed):
        run_mpirun(launch, os.environ, quiet=True)
    ranks = [int(line) for line in (tmp_path / "ranks").read_text().split()]
    assert len(ranks) == 2
    try:
        wait_for(lambda: not any(map(is_alive, ranks)), 60)
    finally:
        for number in filter(is_alive, ranks):
            os.kill(number, signal.SIGKILL)


def test_mpirun_is_not_in_reach_of_the_terminals_interrupt(tmp_path: Path) -> None:
    run_mpirun(mpirun(tmp_path, "ps -o sid= -p $$ > session"), os.environ)
    assert int((tmp_path / "session").read_text()) != os.getsid(0)


# ssh


def over_ssh(folder: Path, body: str) -> SshCommands:
    path = program(folder / "bin" / "ssh", body)
    return ssh_commands(rank_command(folder, ssh=str(path), python="/py"), parse_hosts("a:1,b:1", 2), "job")


HOST = 'while [ "$1" != -- ]; do shift; done; host=$2; line=$3\n'
CHECKED = HOST + 'case "$line" in *"import samestep"*) exit 0;; esac\n'


def test_a_host_that_lets_nobody_in_is_named_and_so_are_all(tmp_path: Path) -> None:
    launch = over_ssh(tmp_path, HOST + 'echo "$host: Permission denied (publickey)." >&2; exit 255')
    with pytest.raises(LaunchError) as caught:
        check_hosts(launch)
    first, second = str(caught.value).splitlines()
    assert first.startswith("a does not let you in without a password: a: Permission denied")
    assert "ssh-copy-id b" in second


def test_a_host_without_samestep_is_named(tmp_path: Path) -> None:
    body = HOST + '[ "$host" = a ] || { echo "No module named samestep" >&2; exit 1; }'
    with pytest.raises(LaunchError) as caught:
        check_hosts(over_ssh(tmp_path, body))
    [line] = str(caught.value).splitlines()
    assert line.startswith("b lacks what the run needs: No module named samestep")
    assert f"({tmp_path}) and the interpreter (/py) must be the same there" in line


def test_a_missing_ssh_is_reported(tmp_path: Path) -> None:
    launch = over_ssh(tmp_path, "")
    (tmp_path / "bin" / "ssh").unlink()
    with pytest.raises(LaunchError, match=r"cannot be started here .*: install an ssh client"):
        check_hosts(launch)


def test_agents_are_shown_with_their_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_over_ssh(over_ssh(tmp_path, CHECKED + 'echo "hello from $host"'))
    assert sorted(capsys.readouterr().err.splitlines()) == ["[a] hello from a", "[b] hello from b"]


@pytest.mark.parametrize(("code", "error", "exit_code"), [(3, RankFailed, 3), (9, RankFailed, 1), (75, Stopped, 75)])
def test_the_first_agent_that_fails_ends_the_others(tmp_path: Path, code: int, error: type, exit_code: int) -> None:
    body = CHECKED + f'[ "$host" = b ] && exit {code}; cat > /dev/null; touch {tmp_path}/ended'
    with pytest.raises(error) as caught:
        run_over_ssh(over_ssh(tmp_path, body))
    assert caught.value.exit_code == exit_code  # type: ignore[attr-defined]
    assert (tmp_path / "ended").exists(), "the other one ended by the end of its input"


def test_a_signal_lets_all_agents_save(tmp_path: Path, missed: list[int]) -> None:
    body = CHECKED + '[ "$host" = b ] && sleep 0.3 && kill -TERM $PPID; cat > /dev/null; exit 75'
    with pytest.raises(Stopped):
        run_over_ssh(over_ssh(tmp_path, body))
    assert missed == []


def test_the_stand_ins_are_what_they_seem(cluster: Cluster) -> None:
    """A program that did not run at all would let many a test here pass."""
    cluster.answers(RUNNING, PENDING)

    def ask() -> str:
        words = ["scontrol", "show"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    assert "JobState=RUNNING" in ask()
    assert "JobState=PENDING" in ask()
    assert "JobState=PENDING" in ask()
    cluster.forgets()
    with pytest.raises(subprocess.CalledProcessError):
        ask()
