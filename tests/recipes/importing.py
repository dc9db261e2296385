"""A recipe's own modules, as a run imports them: from its folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def importable(recipe: Path) -> Iterator[None]:
    """Makes them importable, and forgets them afterwards: their names are everybody's."""
    modules = [path.stem for path in recipe.glob("*.py")]
    before = {name: sys.modules.pop(name) for name in modules if name in sys.modules}
    sys.path.insert(0, str(recipe))
    try:
        yield
    finally:
        sys.path.remove(str(recipe))
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)
