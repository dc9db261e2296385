"""The command line: parses, calls one function, prints. Imports torch only in commands."""

from samestep.cli import (
    average,
    bench,
    check,
    cv,
    demo,
    export,
    init,
    launch,
    plot,
    predict,
    resume,
    runs,
    show,
    stop,
    sweep,
    train,
    tune,
    ui,
    verify,
)
from samestep.cli.app import app

__all__ = [
    "app", "average", "bench", "check", "cv", "demo", "export", "init", "launch", "main", "plot", "predict", "resume", "runs",
    "show", "stop", "sweep", "train", "tune", "ui", "verify",
]  # fmt: skip


def main() -> None:
    app()
