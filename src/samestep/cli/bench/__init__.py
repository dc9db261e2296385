"""The commands that measure: samestep bench ..."""

from samestep.cli.bench import measurements, report, suite
from samestep.cli.bench.shared import bench_app

__all__ = ["bench_app", "measurements", "report", "suite"]
