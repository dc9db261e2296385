"""The recipe's own modules, as a run imports them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.recipes.decomposition.small import RECIPE
from tests.recipes.importing import importable


@pytest.fixture
def decomposition_recipe() -> Iterator[None]:
    with importable(RECIPE):
        yield
