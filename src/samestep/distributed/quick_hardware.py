"""Hardware of this machine, without torch where that is known without it."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from samestep.environment.hardware import Hardware, hardware_without_torch


def quick_hardware(environ: Mapping[str, str]) -> Hardware:
    """Return what `detect_hardware` does; torch is imported only where a GPU may be, or where it is anyway."""
    found = None if "torch" in sys.modules else hardware_without_torch(environ)
    if found is not None:
        return found
    from samestep.distributed.hardware import detect_hardware

    return detect_hardware(environ)
