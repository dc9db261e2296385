"""The commands that measure: samestep bench ..."""

from samestep.cli.bench import measurements
from samestep.cli.bench.shared import bench_app

__all__ = ["bench_app", "measurements"]
