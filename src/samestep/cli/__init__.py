"""The command line: parses, calls one function, prints. Imports torch only in commands."""

from samestep.cli import (
    averaging,
    exporting,
    launching,
    looking,
    predicting,
    runs,
    training,
    tuning,
)
from samestep.cli.app import app

__all__ = [
    "app", "averaging", "exporting", "launching", "looking", "main", "predicting", "runs",
    "training", "tuning",
]  # fmt: skip


def main() -> None:
    app()
