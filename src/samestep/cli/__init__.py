"""The command line: parses, calls one function, prints. Imports torch only in commands."""

from samestep.cli import averaging, launching, looking, runs, training
from samestep.cli.app import app

__all__ = ["app", "averaging", "launching", "looking", "main", "runs", "training"]


def main() -> None:
    app()
