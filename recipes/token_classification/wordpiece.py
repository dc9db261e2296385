"""Trains a WordPiece tokenizer on the training documents, as a folder that transformers loads.

python recipes/token_classification/wordpiece.py data --vocabulary 600
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from documents import read_documents

from samestep.errors import MissingExtraError, SamestepError

FOLDER = "tokenizer"
"""Of the data's folder."""
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}  # fmt: skip


def train_tokenizer(data: Path, vocabulary: int) -> Path:
    """Train it on `train.jsonl`; the folder that it was written to.

    Args:
        data: the folder of the documents.
        vocabulary: how many tokens it may have, at most.
    """
    texts = [document.text for document in read_documents(data / "train.jsonl", None)]
    try:
        from tokenizers import processors
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        raise MissingExtraError("recipes/token_classification", "text") from None
    made = _tokenizer(_vocabulary(texts, vocabulary))
    ends = [(SPECIAL[name], made.token_to_id(SPECIAL[name])) for name in ("sep_token", "cls_token")]
    made.post_processor = processors.BertProcessing(*ends)
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL)
    wrapped.save_pretrained(data / FOLDER)
    return data / FOLDER


def _tokenizer(vocabulary: dict[str, int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    made: Any = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIAL["unk_token"]))
    # Cased: a capital letter is half of what tells a name.
    made.normalizer = normalizers.BertNormalizer(lowercase=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


def _vocabulary(texts: list[str], size: int) -> dict[str, int]:
    """Return the tokens and their numbers, the same in every process.

    The library numbers the letters inside of words in the order of a hash table, which is another one
    each time, and breaks ties between tokens by number. As special tokens they are numbered first.
    """
    from tokenizers import trainers

    letters = sorted({letter for text in texts for letter in text if not letter.isspace()})
    first = [*SPECIAL.values(), *(f"##{letter}" for letter in letters)]
    made = _tokenizer({})
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=first, show_progress=False)
    made.train_from_iterator(texts, trainer)
    found: dict[str, int] = made.get_vocab()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a tokenizer on data/train.jsonl.")
    parser.add_argument("data", type=Path, help="the folder of train.jsonl")
    parser.add_argument("--vocabulary", type=int, default=8000)
    given = parser.parse_args()
    try:
        print(f"wrote {train_tokenizer(given.data, given.vocabulary)}")
    except SamestepError as error:
        print(f"wordpiece: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
