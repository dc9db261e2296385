"""The command line: parses, calls one function, prints. Imports torch only in commands."""

from samestep.cli import bench, check, cv, demo, init, launch, models, plot, runs, show, sweep, train, tune, ui, verify
from samestep.cli.app import app

__all__ = [
    "app", "bench", "check", "cv", "demo", "init", "launch", "main", "models", "plot", "runs", "show", "sweep", "train", "tune",
    "ui", "verify",
]  # fmt: skip


def main() -> None:
    app()
