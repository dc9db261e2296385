"""The modules of a folder's recipe, as a run imports them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.processes import ROOT
from tests.recipes.importing import importable


@pytest.fixture
def recipe(request: pytest.FixtureRequest) -> Iterator[None]:
    """That of the test's folder; tests in `tests/recipes` itself are about metric_learning."""
    name = request.path.parent.name
    with importable(ROOT / "recipes" / ("metric_learning" if name == "recipes" else name)):
        yield
