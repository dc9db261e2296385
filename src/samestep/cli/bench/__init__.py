"""The commands that measure: samestep bench ...; one module for each."""

from samestep.cli.bench import comm, report
from samestep.cli.bench.shared import bench_app

__all__ = ["bench_app", "comm", "report"]
