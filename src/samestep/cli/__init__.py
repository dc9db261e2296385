"""The command line: parses, calls one function, prints. Imports torch only in commands."""

from samestep.cli import launching, looking, runs, training, tuning
from samestep.cli.app import app

__all__ = ["app", "launching", "looking", "main", "runs", "training", "tuning"]


def main() -> None:
    app()
