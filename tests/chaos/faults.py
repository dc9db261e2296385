"""The kinds of faults: each hits a run at a random instant, and checks how it ends."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from tests.chaos.disk import SmallDisk
from tests.chaos.family import members
from tests.cli.processes import command, popen
from tests.distributed.running import settings, train_rank
from tests.ranks import RankProcesses

STEPS = 60
SECONDS_TO_END = 120.0
"""After a fault, every process of the run must have ended by then."""
_HANG = 5.0
_USER_ERROR = 2


@dataclass
class Scene:
    """A run that a fault happens to."""

    run: Path
    world: int
    disk: SmallDisk
    random: random.Random
    every_steps: int
    shard: str = "none"

    def config(self, timeout: float = 8) -> dict[str, Any]:
        """A run that waits no longer for ranks that were killed before they were met."""
        return settings(
            "Slow", self.run, epochs=None, steps=STEPS, log_every=1, params={"seconds": 0.004},
            checkpoint={"every_steps": self.every_steps, "every_epochs": None},
            # A suspended rank 0 still holds the store: the others give up on that, too.
            distributed={
                "timeout": timeout, "device": "cpu", "lost_after": max(timeout, 6), "shard": self.shard,
            },
        )  # fmt: skip

    def ranks(self, timeout: float = 8, dies_at_call: int | None = None) -> RankProcesses:
        """Its ranks, just started."""
        output = str(self.beside(".out"))
        args = (self.config(timeout), str(self.run / "record"), output, dies_at_call)
        return RankProcesses(train_in_chaos, self.world, args)

    def beside(self, suffix: str) -> Path:
        """A file of ours about the run, on a disk that is never full."""
        return self.disk.folder.with_name(self.run.name + suffix)

    def times_started(self) -> int:
        """How often its ranks have met and begun to train."""
        output = self.beside(".out")
        return output.read_text(errors="replace").count("Plan: ") if output.exists() else 0

    def wait(self, longest: float = 2.5) -> None:
        time.sleep(self.random.uniform(0.3, longest))

    @contextmanager
    def launched(self) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
        """The command that starts it, and the file with its output."""
        file = self.beside(".yaml")
        file.write_text(yaml.safe_dump(self.config()))
        with self.beside(".out").open("w+") as output:
            process = popen(command("launch", file, "--nproc", str(self.world)), stdout=output, stderr=output)
            try:
                yield process, output
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()


def train_in_chaos(config: dict[str, Any], record: str, output: str, dies_at_call: int | None) -> None:
    """A rank of a run; rank 0 may kill itself at one of the calls of its save path."""
    with Path(output).open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    if dies_at_call is not None and int(os.environ.get("RANK", "0")) == 0:
        _die_inside_saves(dies_at_call)
    train_rank(config, record)


def _die_inside_saves(at: int) -> None:
    from samestep.checkpoint.files import DigestedFile, Files

    left = [at]

    def deadly(whole: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(*args)

        return call

    for owner, names in (
        (Files, ("make_folder", "open_new", "sync", "replace", "copy", "remove")),
        (DigestedFile, ("write",)),
    ):
        for name in names:
            setattr(owner, name, deadly(getattr(owner, name)))


# -- of ranks -------------------------------------------------------------------------------------


def kill_a_rank(scene: Scene) -> bool:
    return _signal_ranks(scene, signal.SIGKILL, how_many=1)


def kill_all_ranks(scene: Scene) -> bool:
    return _signal_ranks(scene, signal.SIGKILL, how_many=scene.world)


def stop(scene: Scene) -> bool:
    return _signal_ranks(scene, signal.SIGTERM, how_many=1)


def kill_inside_a_save(scene: Scene) -> bool:
    ranks = scene.ranks(dies_at_call=scene.random.randint(1, 120))
    ranks.answers()
    return _was_killed(ranks)


def suspend_a_rank(scene: Scene) -> bool:
    """For longer than the others wait; then it is woken, or killed.

    Once they have met: before that, torch waits without end for a store whose rank is suspended.
    """
    scene.world = max(2, scene.world)
    started_before = scene.times_started()
    ranks = scene.ranks(timeout=_HANG)
    while scene.times_started() == started_before and ranks.processes[0].is_alive():
        time.sleep(0.02)
    time.sleep(scene.random.uniform(0.0, 1.5))
    victim = scene.random.choice(ranks.processes)
    others = [process for process in ranks.processes if process is not victim]
    was_alive = victim.is_alive() and any(process.is_alive() for process in others)
    kill(victim.pid, signal.SIGSTOP)
    started = time.monotonic()
    while any(process.is_alive() for process in others):
        waited = time.monotonic() - started
        assert waited < SECONDS_TO_END, f"ranks still wait for a suspended one after {waited:.0f} s"
        time.sleep(0.05)
    kill(victim.pid, scene.random.choice([signal.SIGCONT, signal.SIGKILL]))
    _expect_end(ranks)
    return was_alive and not (scene.run / "record" / "record.json").exists()


def _signal_ranks(scene: Scene, number: signal.Signals, how_many: int) -> bool:
    ranks = scene.ranks()
    scene.wait()
    pids = [process.pid for process in ranks.processes if process.is_alive()]
    for pid in scene.random.sample(pids, min(how_many, len(pids))):
        kill(pid, number)
    answers = _expect_end(ranks)
    # Only what happened counts: a run may have ended before it is hit.
    return _was_killed(ranks) or any("Stopped: SIGTERM" in str(text) for _, text in answers)


def _expect_end(ranks: RankProcesses) -> list[tuple[bool, Any]]:
    started = time.monotonic()
    answers = ranks.answers()
    seconds = time.monotonic() - started
    assert seconds < SECONDS_TO_END, f"ranks did not end within {seconds:.0f} s: {answers}"
    return answers


def _was_killed(ranks: RankProcesses) -> bool:
    return any(process.exitcode == -signal.SIGKILL for process in ranks.processes)


# -- of the launcher, and of what is below the run ------------------------------------------------


def kill_the_launcher(scene: Scene) -> bool:
    """Its ranks must not outlive it."""
    with scene.launched() as (process, _):
        scene.wait(4.0)
        alive = process.poll() is None
        process.kill()
    return alive


def fill_the_disk(scene: Scene) -> bool:
    before = members()
    with scene.launched() as (process, output):
        scene.wait(4.0)
        scene.disk.fill(before)
        try:
            code = process.wait(SECONDS_TO_END)
        finally:
            scene.disk.free()
        return _ended_by(code, output, "not be written", scene.disk.words)


def fill_the_disk_of_ranks(scene: Scene) -> bool:
    before = members()
    ranks = scene.ranks()
    scene.wait()
    scene.disk.fill(before)
    try:
        answers = _expect_end(ranks)
    finally:
        scene.disk.free()
    return _failed_by(answers, "not be written", scene.disk.words)


def remove_the_directory_of_ranks(scene: Scene) -> bool:
    ranks = scene.ranks()
    scene.wait()
    remove(scene.run)
    happened = _failed_by(_expect_end(ranks), str(scene.run))
    remove(scene.run)
    return happened


def _failed_by(answers: list[tuple[bool, Any]], *words: str) -> bool:
    """Whether ranks failed: then one of them by a mistake that a person can understand."""
    failed = [str(text) for ok, text in answers if not ok]
    last = [text.strip().splitlines()[-1] for text in failed]
    named = [line for line in last if re.search(r"errors\.(CheckpointError|RunDirError): ", line)]
    assert not failed or any(_says(line, words) for line in named), failed
    return bool(failed)


def remove_the_directory(scene: Scene) -> bool:
    with scene.launched() as (process, output):
        scene.wait(4.0)
        remove(scene.run)
        code = process.wait(SECONDS_TO_END)
        happened = _ended_by(code, output, str(scene.run))
    remove(scene.run)
    return happened


def _ended_by(code: int, output: IO[str], *words: str) -> bool:
    """Whether a launch failed: then as a person can understand it, by a fault of the machine's."""
    if code == 0:
        return False  # it was faster
    output.seek(0)
    text = output.read()
    assert code == _USER_ERROR, f"exit code {code} in place of {_USER_ERROR}:\n{text}"
    assert _says(text, words), f"the output lacks some of {words}:\n{text}"
    assert "Traceback" not in text, f"a traceback:\n{text}"
    return True


def _says(text: str, words: Sequence[str]) -> bool:
    return all(word in text for word in words)


def remove(folder: Path) -> None:
    """Remove a directory that others may still write into."""
    deadline = time.monotonic() + 10
    while folder.exists():
        assert time.monotonic() < deadline, f"{folder} comes back again and again"
        shutil.rmtree(folder, ignore_errors=True)


def kill(pid: int | None, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it was faster
        os.kill(pid or 0, number)


Fault = Callable[[Scene], bool]
"""Lets something happen to a run, and waits for its end; whether it was hit at all."""

KINDS: dict[str, tuple[int, Fault]] = {
    "kill a rank": (6, kill_a_rank),
    "kill all ranks": (2, kill_all_ranks),
    "kill inside a save": (5, kill_inside_a_save),
    "stop by SIGTERM": (3, stop),
    "suspend a rank": (2, suspend_a_rank),
    "kill the launcher": (2, kill_the_launcher),
    "fill the disk": (1, fill_the_disk),
    "fill the disk, no launcher": (1, fill_the_disk_of_ranks),
    "remove the directory": (1, remove_the_directory),
    "remove the directory, no launcher": (1, remove_the_directory_of_ranks),
}
"""By name, how often one comes beside the others."""
