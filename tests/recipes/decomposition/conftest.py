"""The recipe's own modules, as a run imports them: from its folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.recipes.decomposition.small import RECIPE

MODULES = tuple(path.stem for path in RECIPE.glob("*.py"))


@pytest.fixture
def decomposition_recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes them importable, and forgets them afterwards: their names are everybody's."""
    monkeypatch.syspath_prepend(RECIPE)
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    yield
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(before)
