"""The recipe's data, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.importing import importable
from tests.recipes.token_classification.small import RECIPE


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 documents to train on and 19 to validate with, which no number of ranks divides."""
    folder = tmp_path_factory.mktemp("documents") / "data"
    folder.mkdir()
    with importable(RECIPE):
        from made_up import make_documents, write_documents
        from wordpiece import train_tokenizer

        write_documents(folder / "train.jsonl", make_documents(48, 1))
        write_documents(folder / "valid.jsonl", make_documents(19, 2))
        train_tokenizer(folder, 300)
    return folder
