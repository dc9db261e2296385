"""The commands that measure: samestep bench ...; one module for each."""

from samestep.cli.bench import checkpoint, comm, loader, memory, report, scaling, suite
from samestep.cli.bench.shared import bench_app

__all__ = ["bench_app", "checkpoint", "comm", "loader", "memory", "report", "scaling", "suite"]
