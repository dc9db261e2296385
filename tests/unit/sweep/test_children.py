"""Commands as child processes, which a stop signal reaches at any moment."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from samestep.errors import Stopped
from samestep.sweep.children import Children


def test_a_child_that_is_started_after_the_stop_signal_gets_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    with Children() as children:
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(sys, "executable", str(program))
        child = children.start("a child", [], tmp_path / "output.txt")
        with pytest.raises(Stopped, match="stopped by SIGTERM"):
            children.refuse_stopped()
        assert child.code == -signal.SIGTERM
