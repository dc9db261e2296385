"""The command line: parses, calls one function, prints. Imports torch only in commands."""

from samestep.cli import (
    advise,
    average,
    bench,
    config_new,
    cv,
    export,
    inspect,
    lanes,
    launch,
    lr_find,
    plot,
    plot_embeddings,
    predict,
    resume,
    runs,
    scan,
    sweep,
    train,
    verify,
)
from samestep.cli.app import app

__all__ = [
    "advise",
    "app",
    "average",
    "bench",
    "config_new",
    "cv",
    "export",
    "inspect",
    "lanes",
    "launch",
    "lr_find",
    "main",
    "plot",
    "plot_embeddings",
    "predict",
    "resume",
    "runs",
    "scan",
    "sweep",
    "train",
    "verify",
]  # fmt: skip


def main() -> None:
    app()
