"""The context of one process: who is first, what closes, and what a failure means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samestep.config import DistributedConfig, load_config
from samestep.distributed.context import SingleProcessContext, create_run_context
from samestep.distributed.hardware import detect_hardware
from samestep.environment.launch import detect_launch
from tests.unit.contexts import TwoRanks

ALONE = detect_launch({})
SECTION = DistributedConfig(device="cpu", threads_per_rank=1)


def test_one_process_always_goes_first(context: SingleProcessContext) -> None:
    for per in ("node", "run"):
        with context.rank0_first(per) as first:  # type: ignore[arg-type]
            assert first


def test_one_process_cannot_wait_for_another(context: SingleProcessContext) -> None:
    with pytest.raises(AssertionError, match="cannot wait for download of rank 0"):
        context.wait_for("download", 0)


class Ordered(TwoRanks):
    """A rank that notes whom it waits for and what it notifies."""

    def __init__(self, rank: int, hosts: list[str]) -> None:
        super().__init__()
        self._rank, self.hosts, self.events = rank, hosts, []
        self.events: list[str]

    @property
    def rank(self) -> int:
        return self._rank

    def notify(self, event: str) -> None:
        self.events.append(f"notify {event}")

    def wait_for(self, event: str, rank: int) -> None:
        self.events.append(f"wait for {rank}: {event}")


@pytest.mark.parametrize(
    ("rank", "hosts", "per", "events"),
    [
        (0, ["n1", "n1"], "node", ["inside True", "notify 1 of n1"]),
        (1, ["n1", "n1"], "node", ["wait for 0: 1 of n1", "inside False"]),
        (1, ["n1", "n2"], "node", ["inside True", "notify 1 of n2"]),
        (1, ["n1", "n2"], "run", ["wait for 0: 1 of the run", "inside False"]),
    ],
)
def test_one_rank_of_each_node_or_of_the_run_goes_first(
    rank: int, hosts: list[str], per: str, events: list[str]
) -> None:
    with Ordered(rank, hosts) as found:
        assert isinstance(found, Ordered)
        with found.rank0_first(per) as first:  # type: ignore[arg-type]
            found.events.append(f"inside {first}")
        assert found.events == events


def test_each_turn_is_an_event_of_its_own() -> None:
    with Ordered(0, ["n1", "n1"]) as found:
        assert isinstance(found, Ordered)
        for _ in range(2):
            with found.rank0_first():
                pass
        assert found.events == ["notify 1 of n1", "notify 2 of n1"]


def test_a_first_rank_that_fails_releases_nobody() -> None:
    """The others learn of its failure instead: what they wait for was not done."""
    found = Ordered(0, ["n1", "n1"])
    with pytest.raises(ZeroDivisionError), found.rank0_first():
        raise ZeroDivisionError
    assert found.events == []
    found.close()


@pytest.mark.requirement("002-M1-1")
def test_threads_are_set_for_the_process() -> None:
    before = torch.get_num_threads()
    try:
        with SingleProcessContext(threads=2) as found:
            assert torch.get_num_threads() == found.threads == 2
    finally:
        torch.set_num_threads(before)


def test_the_log_gets_a_file_until_the_context_is_closed(tmp_path: Path) -> None:
    with SingleProcessContext() as found:
        found.log_to(tmp_path, append=False)
        found.log.main("of the first")
    with SingleProcessContext() as found:
        found.log_to(tmp_path, append=True)
        found.log.main("of the second")
    text = (tmp_path / "rank-0.log").read_text()
    assert [line.split(" ", 2)[2] for line in text.splitlines()] == ["of the first", "of the second"]


class Explaining(SingleProcessContext):
    """A context that knows better what an error means."""

    closed = 0

    def failed(self, error: BaseException) -> BaseException:
        assert not self.closed, "the others are notified first"
        return KeyError("meant") if isinstance(error, ValueError) else error

    def close(self) -> None:
        self.closed += 1
        super().close()


def test_an_error_is_raised_as_what_it_means() -> None:
    found = Explaining()
    with pytest.raises(KeyError, match="meant") as caught, found:
        raise ValueError("seen")
    assert isinstance(caught.value.__cause__, ValueError)
    assert found.closed == 1


def test_an_error_that_means_itself_passes_through() -> None:
    found = Explaining()
    with pytest.raises(ZeroDivisionError), found:
        raise ZeroDivisionError
    assert found.closed == 1


# -- creating -------------------------------------------------------------------------------------


@pytest.mark.requirement("001-D-6")
def test_without_a_launcher_there_is_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    with create_run_context(SECTION, detect_hardware({}), ALONE) as found:
        assert type(found) is SingleProcessContext
        assert found.threads == 1
    assert "One process on cpu, 1 thread" in capsys.readouterr().err


@pytest.mark.requirement("001-D-12")
def test_where_one_process_was_started_enabled_is_one_process_too() -> None:
    section = SECTION.model_copy(update={"enabled": True})
    with create_run_context(section, detect_hardware({}), ALONE) as found:
        assert type(found) is SingleProcessContext


@pytest.mark.requirement("001-S2-2", "001-D-3")
def test_a_whole_config_is_taken_by_its_section() -> None:
    config = load_config({"global_batch": 8, "epochs": 1, "distributed": SECTION.model_dump()})
    with create_run_context(config, detect_hardware({}), ALONE) as found:
        assert (found.device.type, found.threads) == ("cpu", 1)


@pytest.mark.requirement("000-P1-13")
def test_a_device_that_the_caller_chose_wins() -> None:
    device = torch.device("meta")
    with create_run_context(SECTION, detect_hardware({}), ALONE, device) as found:
        assert found.device == device
