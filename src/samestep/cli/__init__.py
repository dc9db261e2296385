"""The command line: parses, calls one function, prints. Imports torch only in commands."""

from samestep.cli import (
    average,
    bench,
    config_new,
    cv,
    export,
    inspect,
    launch,
    plot,
    plot_embeddings,
    predict,
    resume,
    runs,
    scan,
    sweep,
    train,
    tune,
    verify,
)
from samestep.cli.app import app

__all__ = [
    "app",
    "average",
    "bench",
    "config_new",
    "cv",
    "export",
    "inspect",
    "launch",
    "main",
    "plot",
    "plot_embeddings",
    "predict",
    "resume",
    "runs",
    "scan",
    "sweep",
    "train",
    "tune",
    "verify",
]  # fmt: skip


def main() -> None:
    app()
