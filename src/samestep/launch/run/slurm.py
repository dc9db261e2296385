"""Talks to Slurm: submits a job, lists a run's jobs, follows, cancels. No torch here."""

from __future__ import annotations

import codecs
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from samestep.checkpoint.ownership import claim
from samestep.environment.variables import process_environment
from samestep.errors import LaunchError, RankFailed, Stopped, TextError, code_of_ranks
from samestep.launch.commands.slurm import SlurmJob
from samestep.parsing.json_text import read_json_lines

FINAL = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"]
)
"""Final states of a job; one that is requeued is soon PENDING again."""
_SECONDS_TO_ANSWER = 60.0
_SECONDS_OF_SILENCE = 300.0
_SECONDS_TO_SAVE = 60.0
_LONGEST_PAUSE = 15.0
"""Between two queries to Slurm, which has many users."""
_JOBS, _SCRIPT = "jobs.jsonl", "job.sh"


@dataclass(frozen=True)
class Submitted:
    """A job of a run, as it was submitted."""

    job: str
    when: float
    script: str
    array: bool = False
    style: str = "srun"


@dataclass(frozen=True)
class JobState:
    """The state of a job, as Slurm reports it."""

    job: str
    state: str
    """UNKNOWN once Slurm has forgotten it."""
    reason: str = ""
    nodes: str = ""
    elapsed: str = ""
    restarts: str = ""
    exit_code: str = ""

    @property
    def is_final(self) -> bool:
        return self.state in FINAL or self.state == "UNKNOWN"


def submit(job: SlurmJob) -> Submitted:
    """Write the script and submit it; refused while the run has another job."""
    folder = job.folder
    refuse_second_job(folder.parent)
    claim(folder.parent, folder.name)
    script = folder / _SCRIPT
    try:
        write_private(script, job.script(), 0o600)
    except OSError as error:
        raise LaunchError(f"{script} cannot be written: {error.strerror or error}") from None
    answer = _slurm(["sbatch", "--parsable", str(script)], job.rank_command.variables())
    found = Submitted(
        answer.strip().partition(";")[0],
        time.time(),
        str(script),
        job.rank_command.config.launch.slurm.array is not None,
        job.rank_command.config.launch.slurm.style,
    )
    _record(folder, found)
    return found


def _record(folder: Path, job: Submitted) -> None:
    try:
        with (folder / _JOBS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(job)) + "\n")
    except OSError as error:
        raise LaunchError(
            f"job {job.job} is submitted, but that cannot be recorded in {folder}: "
            f"{error.strerror or error}. samestep show and stop will not know it; scancel {job.job} ends it"
        ) from None


def job_of_script(job: SlurmJob) -> Submitted | None:
    """Return a job of the same script that has not ended, which is recorded if it was not; None if there is none."""
    script = str(job.folder / _SCRIPT)
    if not Path(script).exists():
        return None
    for line in _slurm(["squeue", "--me", "--noheader", "--format=%i %o"]).splitlines():
        number, _, command = line.partition(" ")
        if command.strip() == script:
            style = job.rank_command.config.launch.slurm.style
            found = Submitted(number, time.time(), script, style=style)
            _record(job.folder, found)
            return found
    return None


def refuse_second_job(run: Path) -> None:
    """Refuse to start anything in a run's directory while the run has a job."""
    for earlier in jobs_of(run):
        state = state_of(earlier.job)
        if not state.is_final:
            raise LaunchError(
                f"run {run} has job {earlier.job}, which is {state.state}: two jobs must not write "
                f"to one run. Wait for it, or: samestep stop {run}"
            )


def jobs_of(run: Path) -> list[Submitted]:
    """Return the jobs that were submitted for a run, the newest last."""
    path = run / "slurm" / _JOBS
    if not path.exists():
        return []
    try:
        return [Submitted(**(row or {})) for row in read_json_lines(path)]
    except (TextError, TypeError) as error:
        raise LaunchError(
            f"{path} cannot be read: {error}. squeue --me shows your jobs; remove the file when none "
            "of them belongs to this run"
        ) from None


def newest_job(run: Path) -> Submitted:
    jobs = jobs_of(run)
    if not jobs:
        raise LaunchError(
            f"{run} has no Slurm job: give the directory of a run that samestep launch --via slurm submitted"
        )
    return jobs[-1]


def state_of(job: str) -> JobState:
    """Return what Slurm reports of a job, or of the first task of an array that has not ended."""
    try:
        answer = _slurm(["scontrol", "show", "job", "--oneliner", job])
    except LaunchError as error:
        if "Invalid job id" in str(error):
            return JobState(job, "UNKNOWN", "Slurm has forgotten it")
        raise
    states = [_read(line) for line in answer.splitlines() if line.strip()]
    unfinished = [state for state in states if not state.is_final]
    failed = [state for state in states if state.state != "COMPLETED"]
    return next(iter([*unfinished, *failed, *states]), JobState(job, "UNKNOWN", "no answer"))


def _read(line: str) -> JobState:
    fields = dict(re.findall(r"(\w+)=(\S*)", line))
    return JobState(
        fields.get("JobId", ""),
        fields.get("JobState", "UNKNOWN"),
        "" if fields.get("Reason") == "None" else fields.get("Reason", ""),
        "" if fields.get("NodeList") == "(null)" else fields.get("NodeList", ""),
        fields.get("RunTime", ""),
        fields.get("Restarts", ""),
        fields.get("ExitCode", ""),
    )


def cancel(job: Submitted) -> None:
    """Cancel a job; its ranks save first."""
    if job.style == "mpirun":
        # OpenMPI kills its ranks on the SIGTERM of scancel; this signal it forwards to them.
        _slurm(["scancel", "--batch", "--signal=USR2", job.job])
        deadline = time.monotonic() + _SECONDS_TO_SAVE
        while not state_of(job.job).is_final and time.monotonic() < deadline:
            time.sleep(1.0)
    if not state_of(job.job).is_final:
        _slurm(["scancel", job.job])


def logs_of(run: Path, job: Submitted) -> list[Path]:
    """Return the job's output files: one, or one for each task of an array."""
    pattern = f"{job.job}_*.out" if job.array else f"{job.job}.out"
    return sorted((run / "slurm").glob(pattern))


def follow_job(
    run: Path,
    job: Submitted,
    report: Callable[[str], None],
    show: IO[str] | None,
    hurries: Callable[[], bool] = lambda: False,
    patience: float = _SECONDS_OF_SILENCE,
) -> None:
    """Show a job's states and its output until it ends; raises if it failed.

    Args:
        hurries: Called again and again; whether Slurm is to be asked at once.
        patience: Seconds that Slurm may be silent.
    """
    outputs, answers = _Outputs(run, job), _Patience(patience)
    before, ended = "", None
    state: JobState | None = None
    pause, next_query = 0.5, 0.0
    while True:
        if hurries() or state is None or time.monotonic() > next_query:
            last, state = state, answers.state_of(job.job)
            if state.state == "UNKNOWN" and last is not None and last.is_final:
                state = last  # it is forgotten soon after its end
            pause = min(_LONGEST_PAUSE, 1.2 * pause)
            next_query = time.monotonic() + (pause if ended is None else 0.0)
        line = f"job {job.job}: {state.state}{f' ({state.reason})' if state.reason else ''}"
        if state.nodes:
            line += f" on {state.nodes}"
        if line != before:
            report(line)
            before = line
        for text in outputs.read_new():
            if show is not None:
                print(text, end="", file=show, flush=True)
        if not state.is_final:
            ended = None  # also if it was requeued meanwhile
        elif ended is None:
            ended = time.monotonic()  # the ranks' last lines may still be on their way
        elif time.monotonic() - ended > 1.0:
            break
        time.sleep(0.25 if ended is not None else 0.5)
    if state.state != "COMPLETED":
        raise _failure(run, job, state)


def _failure(run: Path, job: Submitted, state: JobState) -> Exception:
    code = int(state.exit_code.partition(":")[0] or 0)
    if code == Stopped.exit_code:
        return Stopped(f"job {job.job} was stopped ({state.state}) and has saved")
    logs = ", ".join(map(str, logs_of(run, job))) or "none"
    return RankFailed(
        f"job {job.job} ended as {state.state} with exit code {state.exit_code}; its output: {logs}",
        code_of_ranks(code),
    )


class _Patience:
    """A Slurm controller that does not answer for a while is no reason to give up."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._silent_since: float | None = None

    def state_of(self, job: str) -> JobState:
        while True:
            try:
                state = state_of(job)
            except LaunchError:
                self._silent_since = self._silent_since or time.monotonic()
                if time.monotonic() - self._silent_since > self._seconds:
                    raise
                time.sleep(0.5)
            else:
                self._silent_since = None
                return state


class _Outputs:
    """A job's output files, each read from where the last reading ended."""

    def __init__(self, run: Path, job: Submitted) -> None:
        self._run, self._job = run, job
        self._read: dict[Path, int] = {}
        self._decoders: dict[Path, codecs.IncrementalDecoder] = {}

    def read_new(self) -> Iterator[str]:
        for path in logs_of(self._run, self._job):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
                self._read[path] = file.tell()
            if text:
                make = codecs.getincrementaldecoder("utf-8")
                yield self._decoders.setdefault(path, make("replace")).decode(text)


def _slurm(argv: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    # A job that is submitted from inside another one must not inherit that one's variables.
    environ = process_environment()
    kept = {k: v for k, v in environ.items() if not k.startswith("SLURM_") or k == "SLURM_CONF"}
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_SECONDS_TO_ANSWER, check=False,
            # By the environment, which sbatch passes to the job: a script can be read by others.
            env={**kept, **(variables or {})},
        )  # fmt: skip
    except OSError as error:
        raise LaunchError(
            f"{argv[0]} cannot be started here ({error.strerror}): is this a machine of a Slurm "
            "cluster? --print shows the script without submitting it"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{argv[0]} did not answer within {_SECONDS_TO_ANSWER:g} s") from None
    if done.returncode != 0:
        reason = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise LaunchError(f"{argv[0]} failed: {reason}")
    return done.stdout


def write_private(path: Path, text: str, mode: int, *, new: bool = False) -> None:
    """Write a file that only its owner can read, from its first byte on.

    Args:
        new: whether an existing file, or a link in its place, is an error and stays as it is.
    """
    how = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if new else os.O_TRUNC)
    data = text.encode("utf-8")
    with os.fdopen(os.open(path, how, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)  # also of a file that was there, and whatever the umask is
        file.write(data)
