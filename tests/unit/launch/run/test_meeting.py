"""Machines that come and go meet at a store whose server has the launch's secret, or not at all."""

from __future__ import annotations

import pytest

from samestep.distributed.tcp_store import serve_store
from samestep.environment.secret import Signer
from samestep.errors import LaunchError
from samestep.launch.run.rendezvous import _elastic_store

MINE, THEIRS = Signer("the secret of this launch", "agents"), Signer("that of somebody", "agents")


def test_a_store_of_somebody_without_the_secret_is_refused_and_ours_is_joined() -> None:
    for signer in (THEIRS, None):
        stranger = serve_store("127.0.0.1", [0], "samestep-mine", 10, signer)
        with pytest.raises(LaunchError, match="served by somebody without this launch's secret"):
            _elastic_store(None, "127.0.0.1", stranger.port, "samestep-mine", MINE)
        del stranger
    first = _elastic_store("127.0.0.1", "127.0.0.1", 0, "samestep-mine", MINE)
    other = _elastic_store("127.0.0.1", "127.0.0.1", first.port, "samestep-mine", MINE)
    first.set("key", "value")
    assert other.get("key") == b"value"
