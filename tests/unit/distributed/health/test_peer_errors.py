"""Errors that mean a broken connection, and those that do not."""

from __future__ import annotations

import pytest

from samestep.distributed.health.peer_errors import lost_peer


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer",
        "Connection reset by peer",
        "NCCL error in: ProcessGroupNCCL.cpp:1251, remote process exited",
        "ncclUnhandledCudaError: Call to CUDA function failed",
        "Socket Timeout",
        "Timed out waiting 1000ms for recv operation to complete",
        "the operation timed out",
        "Application timeout caused pair closure",
    ],
)
def test_a_backends_words_for_a_broken_connection_are_known(text: str) -> None:
    found = lost_peer(RuntimeError(text))
    assert found is not None
    assert str(found) == f"lost another rank: {text}"
    assert found.timed_out == ("time" in text.lower())


@pytest.mark.parametrize(
    "error",
    [
        None,
        ValueError("Connection closed by peer"),
        OSError("Connection refused"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError(""),
    ],
)
def test_an_error_of_this_ranks_own_is_no_lost_peer(error: BaseException | None) -> None:
    assert lost_peer(error) is None


def test_only_the_first_line_is_kept_and_not_too_much_of_it() -> None:
    found = lost_peer(RuntimeError("\nNCCL " + "x" * 500 + "\nException raised from ...\n"))
    assert str(found) == "lost another rank: NCCL " + "x" * 195
