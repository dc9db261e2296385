"""The command line: parses, calls one function, prints. Imports torch only in commands."""

from samestep.cli import exporting, launching, looking, predicting, runs, training
from samestep.cli.app import app

__all__ = ["app", "exporting", "launching", "looking", "main", "predicting", "runs", "training"]


def main() -> None:
    app()
