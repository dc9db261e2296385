"""A store that is gone, silent, or simply answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from samestep.distributed.health.store import TimeoutStore
from samestep.environment.secret import Signer


@pytest.fixture
def store() -> Iterator[TimeoutStore]:
    found = TimeoutStore(dist.HashStore(), seconds=30)  # type: ignore[attr-defined]
    yield found
    found.close()


def test_documents_come_back_and_missing_ones_are_none(store: TimeoutStore) -> None:
    store.set("beat", '{"step": 3}')
    assert store.has("beat")
    assert store.read("beat") == {"step": 3}
    assert not store.has("other")
    assert store.read("other") is None


def test_counters_add_up(store: TimeoutStore) -> None:
    assert [store.add("left", 1), store.add("left", 2), store.add("left", 0)] == [1, 3, 3]


def test_what_was_set_first_stays(store: TimeoutStore) -> None:
    store.set_first("failed", '{"rank": 2}')
    store.set_first("failed", '{"rank": 0}')
    assert store.read("failed") == {"rank": 2}


class Broken:
    """A store whose connection is closed."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            self.calls += 1
            raise RuntimeError("Connection reset by peer")

        return call


def test_a_store_that_broke_is_gone_and_is_not_called_again() -> None:
    broken = Broken()
    found = TimeoutStore(broken, seconds=30)
    assert found.add("left", 1) is None
    assert found.is_gone
    assert not found.is_silent
    assert (found.read("beat"), found.has("beat"), found.add("left", 1)) == (None, False, None)
    assert broken.calls == 1
    found.close()


def test_a_store_that_does_not_answer_in_time_is_silent() -> None:
    answers = threading.Event()

    class Silent:
        def add(self, key: str, number: int) -> int:
            answers.wait(60)
            return 1

    found = TimeoutStore(Silent(), seconds=0.02)
    assert found.add("left", 1) is None
    assert found.is_gone
    assert found.is_silent
    assert found.read("beat") is None, "it is not called again"
    answers.set()
    found.close()


def test_a_closed_store_answers_nothing_and_may_be_closed_twice() -> None:
    found = TimeoutStore(dist.HashStore(), seconds=30)  # type: ignore[attr-defined]
    found.set("beat", "{}")
    found.close()
    found.close()
    assert found.is_gone
    assert not found.has("beat")


def test_what_somebody_without_the_secret_writes_is_not_there_and_reported_once() -> None:
    shared = dist.HashStore()  # type: ignore[attr-defined]
    told: list[str] = []
    mine = TimeoutStore(shared, 30, Signer("a secret of this launch", "heartbeats"), told.append)
    shared.set("failed", '{"rank": 1, "message": "\\u001b[2J all is lost"}')
    assert not mine.has("failed")
    assert mine.read("failed") is None
    assert told == ["failed"]
    mine.set_first("failed", '{"rank": 2}')
    assert mine.read("failed") == {"rank": 2}, "a stranger cannot keep a rank from reporting"
    mine.set_first("failed", '{"rank": 0}')
    assert mine.read("failed") == {"rank": 2}
    shared.set("beat/1", shared.get("failed"))
    assert mine.read("beat/1") is None, "signed, but for another place"
    mine.close()


def test_texts_of_others_have_no_control_characters(store: TimeoutStore) -> None:
    store.set("failed", '{"message": "\\u001b[31mred\\u0007", "inner": {"text": "a\\nb\\u009b"}}')
    assert store.read("failed") == {"message": "\\x1b[31mred\\x07", "inner": {"text": "a\nb\\x9b"}}
