"""The one function of seqeval that BERT-NER calls."""

from collections.abc import Sequence


def classification_report(y_true: Sequence[Sequence[str]], y_pred: Sequence[Sequence[str]], digits: int = 4) -> str:
    """Return how many labels are right."""
    pairs = [pair for true, found in zip(y_true, y_pred) for pair in zip(true, found)]  # noqa: B905
    return f"{sum(true == found for true, found in pairs)} of {len(pairs)} right"
