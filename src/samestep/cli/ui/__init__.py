"""`samestep ui`: a live view of runs, sweeps and verifications."""

from samestep.cli.ui import command

__all__ = ["command"]
