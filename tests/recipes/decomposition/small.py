"""The recipe with few steps of few samples."""

from __future__ import annotations

from tests.cli.processes import ROOT

RECIPE = ROOT / "recipes" / "decomposition"
CONFIG = RECIPE / "config"
