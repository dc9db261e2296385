"""A thread that publishes what this rank does, and watches what the others do.

Beats go to the rendezvous store, about one a second; no collective is involved. From them
come the report on a hang, the name of a rank that is gone, and the end of a rank that is
stuck after another one failed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import IO, Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from samestep.distributed.health.activity import BETWEEN_STEPS, EXCHANGE, READING, SAVE, STARTING, Activity
from samestep.distributed.health.failure_report import report_failure
from samestep.distributed.health.hang_report import (
    Beat,
    absence_of,
    calls_of,
    different_calls,
    failed_first,
    failure_of,
    hang_report,
    parted,
    process_state,
    stacks_of,
    unmatched,
)
from samestep.distributed.health.store import TimeoutStore
from samestep.environment.secret import Signer
from samestep.environment.variables import agent_serves_store, process_environment
from samestep.errors import CollectiveMismatch, PeerLost, RankHung, SamestepError

_SECONDS_TO_END = 3.0
"""How long a rank gets to end by itself after another one has failed."""
_SECONDS_TO_LISTEN = 5.0
"""A rank that waits for longer checks whether the others are alive."""
_SECONDS_TO_SERVE = 8.0
"""How long rank 0 keeps serving the store for ranks that look up why the run ended."""


class Heartbeat:
    """Publishes this rank's activity and watches the run."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        activity: Activity,
        timeout: float,
        lost_after: float,
        signer: Signer | None = None,
    ) -> None:
        self._served = store  # rank 0 may serve it to the others, as long as it is held
        # A separate connection, where torch can make one: the first one may be blocked.
        own = store.clone() if hasattr(store, "clone") else store
        # Of this run only: several can follow each other in one process, at one store.
        number = own.add(f"samestep/runs of rank {rank}", 1)
        place = PrefixStore(f"samestep/{number}", own)
        self._store = TimeoutStore(place, lost_after, signer, self._report_foreign)
        self._rank, self._world, self._activity, self._timeout = rank, world, activity, timeout
        self._main = threading.current_thread().ident
        self._interval = min(1.0, timeout / 8)
        self._lost_after = lost_after
        self._last_look: tuple[float, dict[int, int]] | None = None
        """When this rank, waiting, last looked at all ranks' beats, and their numbers."""
        self._host, self._number = socket.gethostname(), 0
        self._moves_seen, self._moved = activity.moves, time.monotonic()
        self._answered = 0
        """The last request for its stack that this rank has answered."""
        self._before_end: Callable[[], None] = _nothing
        self._verdict: SamestepError | None = None
        """What this rank, waiting for long, has found out about the others."""
        self._failure_seen: float | None = None
        self._store_lost: float | None = None
        self._has_left = False
        self._silence: dict[int, tuple[int | None, float, float]] = {}
        """By rank: its last beat, for how long no other came while this rank looked, and when it looked."""
        self._gone = 0
        """Ranks that are known to have ended silently."""
        self._stacks: IO[str] | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._live, name="samestep-heartbeat", daemon=True)
        self._thread.start()

    def dump_stacks_to(self, file: IO[str]) -> None:
        """Set where all stacks are written if this process holds the interpreter lock and cannot beat."""
        self._stacks = file
        self._arm_dump()

    def before_end(self, finish: Callable[[], None]) -> None:
        """Set what must be finished before this process is ended from outside: a save in flight."""
        self._before_end = finish

    def stop(self) -> None:
        """End the thread. Safe to call twice."""
        self._done.set()
        self._thread.join(self._lost_after + 1)  # unless the store has fallen silent
        self._before_end = _nothing  # which may hold the model, and that the process group
        if self._stacks is not None:
            faulthandler.cancel_dump_traceback_later()
            self._stacks = None

    def _report_foreign(self, place: str) -> None:
        print(
            f"samestep: rank {self._rank}: somebody without this launch's secret wrote {place!r} to the store "
            "of the ranks: it is ignored (docs/security.md)",
            file=sys.stderr,
            flush=True,
        )

    # -- this rank's thread ----------------------------------------------------------------

    def _live(self) -> None:
        self._beat()
        last = time.monotonic()
        while not self._done.wait(self._interval):
            now = time.monotonic()
            if now - last > 5 * self._interval + _SECONDS_TO_LISTEN:
                self._last_look = None  # this process was suspended for a while, and so may others
            last = now
            self._beat()
            if self._store.has("failed"):
                self._end_if_stuck()
            self._answer_request()
            waited = self._seconds_waiting()
            self._watch_for_mismatch(waited)
            self._watch_for_silence(waited)
            if waited < self._interval:
                self._verdict = None  # it came back after all
            elif waited > self._timeout - 2.5 * self._interval and self._verdict is None:
                self._verdict = self._compose(*self._look_around())
            if waited > self._timeout + _SECONDS_TO_END:
                # A backend that does not raise by itself: the main thread will not return.
                self._die(self._verdict or RankHung("a collective never returned"))
            if self._store.is_gone:
                self._end_without_store(waited)

    def _beat(self) -> None:
        self._arm_dump()
        self._number += 1
        document = {"number": self._number, **self._now().as_json()}
        self._store.set(f"beat/{self._rank}", json.dumps(document))

    def _arm_dump(self) -> None:
        """Dump all stacks unless another beat comes first: before the others give up on this rank."""
        if self._stacks is not None:
            faulthandler.dump_traceback_later(0.75 * self._timeout, file=self._stacks)

    def _seconds_still(self) -> float:
        """Return how long this rank has been where it is, as far as this thread has looked."""
        now = time.monotonic()
        if self._activity.moves != self._moves_seen:
            self._moves_seen, self._moved = self._activity.moves, now
        return now - self._moved

    def _now(self) -> Beat:
        return Beat.of(self._activity, self._rank, self._host, self._seconds_still())

    def _seconds_waiting(self) -> float:
        if self._activity.phase not in (EXCHANGE, READING):
            return 0.0
        return self._seconds_still()

    def _seconds_stuck(self) -> float:
        """Return how long nothing has moved in a step; what comes after the steps may take long."""
        idle = self._activity.phase in (STARTING, BETWEEN_STEPS, SAVE)
        return 0.0 if idle else self._seconds_still()

    def _answer_request(self) -> None:
        """Publish this rank's stack if another rank has requested all stacks."""
        newest = self._store.add("requests", 0) or 0
        if newest > self._answered:
            self._answer(newest)

    def _answer(self, request: int, trace: str = "") -> None:
        self._answered = request
        frame = sys._current_frames().get(self._main or 0)
        # With a trace, the main thread has left a collective that broke.
        stack = trace or "".join(traceback.format_stack(frame))
        answer = {"stack": stack, "calls": list(self._activity.recent)}
        self._store.set(f"answer/{self._rank}", json.dumps(answer))

    def _watch_for_mismatch(self, waited: float) -> None:
        """End this rank if another one waits in another collective, and they parted at some call.

        As after `if run.is_main: run.reduce(...)`: both would wait for the whole timeout.
        """
        if waited < min(_SECONDS_TO_LISTEN, self._timeout / 4) or self._verdict is not None:
            return
        mine = self._now()
        others = [
            beat
            for beat, _ in self.beats()
            if beat.waits and (beat.sequence, beat.collective) != (mine.sequence, mine.collective)
        ]
        if not others or min(beat.seconds for beat in others) < 2 * self._interval:
            return
        found = parted(self._look_around()[1])
        if found is None or self._activity.sequence != mine.sequence:
            return
        mismatch = CollectiveMismatch(found)
        self._store.set_first("failed", failure_of(self._rank, self._host, mismatch))
        self._die(mismatch)

    def _watch_for_silence(self, waited: float) -> None:
        """End this rank if one it waits for gives no sign of life: its machine or cable is gone.

        A connection that breaks is noticed at once; one that only falls silent is not.
        """
        if waited < min(_SECONDS_TO_LISTEN, self._lost_after):
            self._last_look = None
            return
        now = time.monotonic()
        if self._last_look is not None and now - self._last_look[0] < self._lost_after:
            return
        before, beats = self._last_look, self.beats()
        self._last_look = (now, {beat.rank: number for beat, number in beats})
        silent = [b for b, n in beats if before is not None and before[1].get(b.rank) == n]
        gone = [beat for beat in silent if beat.rank != self._rank]
        if gone:
            self._give_up(gone)
            names = "; ".join(map(str, gone))
            self._die(PeerLost(f"no sign of life for {self._lost_after:g} s: {names}"))

    def _end_without_store(self, waited: float) -> None:
        """End this rank if it waits for others: the store ends with rank 0, or with its machine.

        The connection to rank 0 breaks, too, but this rank may wait for another one, which is stopped.
        """
        now = time.monotonic()
        self._store_lost = self._store_lost or now
        if self._store.is_silent and waited > min(_SECONDS_TO_LISTEN, self._lost_after):
            silence = f"the store of the ranks did not answer for {self._lost_after:g} s"
            self._die(PeerLost(f"{silence}: rank 0's machine, or the network to it, is gone"))
        # Unless its main thread ends by itself, and with a better reason.
        waits = not self._store.is_silent and min(waited, now - self._store_lost) > _SECONDS_TO_END
        if waits or self._seconds_stuck() > max(30.0, self._timeout):
            self._die(
                PeerLost(f"the store of the ranks has closed, as when rank 0 ends, and this rank {self._now().where()}")
            )

    def beats(self) -> list[tuple[Beat, int]]:
        """Return all ranks' last beats, and their numbers. From any thread."""
        found = [self._store.read(f"beat/{rank}") for rank in range(self._world)]
        numbered = [(document, document.pop("number")) for document in found if document]
        return [(self._read_beat(document, silent=True), number) for document, number in numbered]

    def _read_beat(self, document: Mapping[str, Any], silent: bool) -> Beat:
        beat = Beat(**{**document, "silent": silent})
        here = silent and beat.host == self._host
        return replace(beat, process=process_state(beat.pid)) if here else beat

    def _give_up(self, gone: list[Beat]) -> None:
        """Report for a rank that it is gone: it cannot, and others may wait until someone does."""
        self._store.set_first("failed", absence_of(gone[0]))

    def _end_if_stuck(self) -> None:
        if self._activity.phase == SAVE:
            return  # it will end by itself, and the checkpoint is worth the wait
        now = time.monotonic()
        self._failure_seen = self._failure_seen or now
        if now - self._failure_seen > _SECONDS_TO_END:
            cause = self._store.read("failed") or {}
            was = f"this rank was {self._now().where().removeprefix('is ')}"
            self._die(PeerLost(f"{was} and could not end by itself after {failed_first(cause)}"))

    def _die(self, error: SamestepError) -> None:
        report_failure(error)
        self._before_end()
        self._store.add("left", 1)
        for file in (sys.stderr, self._stacks):
            if file is not None:
                print(f"samestep: rank {self._rank}: {error}", file=file, flush=True)
        os._exit(error.exit_code)

    # -- ordering between ranks ------------------------------------------------------------

    def notify(self, event: str) -> None:
        """Release the ranks that wait for this event."""
        self._store.set(f"event/{event}", "happened")

    def wait_for(self, event: str, rank: int) -> None:
        """Wait until a rank notifies the others of this event, however long it takes.

        `PeerLost` if any rank fails meanwhile, or that rank gives no sign of life any more.
        """
        while not self._store.has(f"event/{event}"):
            lost = self._store.is_gone or self._store.has("failed") or self.is_gone(rank)
            if lost and not self._store.has(f"event/{event}"):
                raise PeerLost(f"waited for rank {rank} to go first")
            time.sleep(self._interval / 8)

    # -- what happened to the others -------------------------------------------------------

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank has ended, or gave no sign of life for `lost_after` seconds. From any thread."""
        document = self._store.read(f"beat/{rank}") or {}
        number, now = document.pop("number", None), time.monotonic()
        last, silent, looked = self._silence.get(rank, (None, 0.0, now))
        # Only while this process looked: it may have been suspended, and the other with it.
        silent = silent + min(now - looked, self._interval) if number == last else 0.0
        self._silence[rank] = (number, silent, now)
        # Of a silent one only: a rank in another container may have the same host, and other process ids.
        is_silent = silent > 3 * self._interval and bool(document)
        ended = is_silent and self._read_beat(document, silent=True).process == "gone"
        return ended or silent > self._lost_after

    def announce(self, error: BaseException) -> None:
        """Notify the others that this rank fails by itself, so that they do not wait for it."""
        self._done.set()  # or our own thread would end this process
        self._store.set_first("failed", failure_of(self._rank, self._host, error))

    def explain(self, lost: PeerLost, trace: str = "") -> SamestepError:
        """Return why a collective broke: a rank failed, is gone, hangs, or called another one."""
        self._done.set()  # our own thread must not end this process while we find out
        self._thread.join(self._lost_after + 1)
        if lost.timed_out and self._verdict is not None:
            return self._verdict
        beats, answers = self._look_around(trace)
        cause = self._store.read("failed")
        if lost.timed_out or (cause is not None and cause.get("kind") == RankHung.__name__):
            return self._compose(beats, answers)
        if cause is not None:
            return PeerLost(f"rank {self._rank}: {failed_first(cause)}")
        gone = [beat for beat in beats if beat.silent]
        self._gone = len(gone)
        if gone:
            self._give_up(gone)
            return PeerLost(f"rank {self._rank} lost a peer: {'; '.join(map(str, gone))}")
        mismatch = different_calls(calls_of(answers)) or unmatched(beats, answers)
        if mismatch is not None:
            return CollectiveMismatch(mismatch)
        return PeerLost(f"rank {self._rank} {lost}")

    def _compose(self, beats: list[Beat], answers: Mapping[int, dict[str, Any]]) -> RankHung | CollectiveMismatch:
        report = hang_report(beats, stacks_of(answers), calls_of(answers), self._timeout)
        own = unmatched(beats, answers)
        if own is not None:
            return CollectiveMismatch(f"{own}\n{report}")
        return RankHung(report, [beat.rank for beat in beats if beat.is_awaited])

    def _look_around(self, trace: str = "") -> tuple[list[Beat], dict[int, dict[str, Any]]]:
        """Return all ranks' last beats, and their stacks, which this requests."""
        request = self._store.add("requests", 1) or 0
        self._answer(request, trace)
        before = {rank: self._store.read(f"beat/{rank}") for rank in range(self._world)}
        deadline = time.monotonic() + 3 * self._interval
        while time.monotonic() < deadline and not self._store.has("failed"):
            time.sleep(self._interval / 4)
            self._beat()  # or the others would take this rank for silent meanwhile
        beats = []
        for rank, old in before.items():
            new = self._store.read(f"beat/{rank}")
            if old is None or new is None:
                continue
            moved = new.pop("number") != old["number"] or rank == self._rank
            beats.append(self._read_beat(new, silent=not moved))
        answers = {rank: self._store.read(f"answer/{rank}") for rank in range(self._world)}
        return beats, {rank: answer for rank, answer in answers.items() if answer is not None}

    def close(self) -> None:
        """Stop using the store."""
        self.stop()
        self._store.close()

    def leave(self) -> None:
        """Record that this rank knows why the run ended; the store stays until all do."""
        if self._has_left:
            return
        self._has_left = True
        left = self._store.add("left", 1)
        if self._rank != 0 or agent_serves_store(process_environment()):
            return  # the store lives with the agent, or with rank 0
        deadline = time.monotonic() + _SECONDS_TO_SERVE
        while (left or self._world) < self._world - self._gone and time.monotonic() < deadline:
            time.sleep(self._interval / 8)
            left = self._store.add("left", 0)


def _nothing() -> None:
    """There is nothing to finish."""
