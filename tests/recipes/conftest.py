"""The recipe's own modules, as a run imports them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.recipes.importing import importable
from tests.recipes.small import RECIPE


@pytest.fixture
def recipe() -> Iterator[None]:
    with importable(RECIPE):
        yield
