"""All measurements by name, and how each is presented. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from samestep.bench import comm_report, memory_report, scaling_report
from samestep.bench.document import Document
from samestep.bench.presentation import Presentation
from samestep.bench.scaling_report import with_efficiency
from samestep.errors import TextError

_PRESENTED: Mapping[str, Callable[[Document], Presentation]] = {
    "comm": comm_report.present,
    "scaling": scaling_report.present,
    "memory": memory_report.present,
}
"""By a document's kind."""


def present(document: Document) -> Presentation:
    """Return how a measurement is shown.

    Raises:
        TextError: if this samestep knows no measurement of this kind.
    """
    if document.kind not in _PRESENTED:
        raise TextError(f"a result of kind {document.kind!r} is not known here: there are {', '.join(_PRESENTED)}")
    return _PRESENTED[document.kind](document)


def joined(worlds: Sequence[Document]) -> Document:
    """Return one measurement on several numbers of ranks, each of which is a document."""
    first, rows = worlds[0], [row for one in worlds for row in one.rows]
    return Document(first.kind, first.machine, with_efficiency(rows) if first.kind == "scaling" else rows)
