"""What is sent to a server of warm processes arrives as it was, with its files."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from samestep.launch.forkserver.forked import Imported
from samestep.launch.forkserver.requests import ForkRequest, receive, send


def test_a_request_arrives_as_it_was() -> None:
    words = ["train", "", "a=ü\n b", os.fsdecode(b"\xff"), "x" * 300_000]
    variables = {"A": "1=2", "EMPTY": "", "ODD": os.fsdecode(b"\xfe")}
    request = ForkRequest(words, [0, 1, 7], variables)
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    with ours, theirs:
        # More than a socket holds: the other end must read meanwhile.
        sender = threading.Thread(target=send, args=(ours, request.texts(), [writing] * 3))
        sender.start()
        texts, files = receive(theirs)
        sender.join()
        assert ForkRequest.of(texts) == request
        assert len(files) == 3
        os.write(files[1], b"same")
        assert os.read(reading, 4) == b"same"
        for file in (reading, writing, *files):
            os.close(file)
        ours.close()
        with pytest.raises(EOFError):
            receive(theirs)


def test_a_variable_that_imports_may_read_makes_a_process_start_cold() -> None:
    imported = Imported({"A": "1", "OMP_NUM_THREADS": "1"}, 1, {"SET_BY_TORCH": "x"})
    assert not imported.differs({"A": "1", "RANK": "0", "SAMESTEP_ENDS_WITH": "7"})
    assert not imported.differs({"A": "1", "CUDA_VISIBLE_DEVICES": "3", "SET_BY_TORCH": "x"})
    assert imported.differs({"A": "2"})
    assert imported.differs({})
    assert imported.differs({"A": "1", "MKL_CBWR": "COMPATIBLE"})
