"""The transformer and its tokenizer: small and new, or a checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from documents import refuse_missing
from torch import Tensor, nn
from wordpiece import FOLDER

from samestep.errors import MissingExtraError, TaskError

DROPOUTS = ("dropout", "hidden_dropout_prob", "classifier_dropout")
"""What configs of transformers call it: of hidden layers, not of attention."""
SMALL = {"attention_dropout": 0.0, "initializer_range": 0.125, "sinusoidal_pos_embds": True}
"""What suits a narrow model with new weights: by dropout in attention a step on CPUs takes four times as long, with
weights of 0.02 it hardly attends to anything at first, and positions that are waves tell neighbours without training."""


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtraError("recipes/token_classification", "text") from None
    return transformers


def load_tokenizer(checkpoint: str, data: Path) -> Any:
    """Return the checkpoint's tokenizer; the one in the data's folder if there is no checkpoint."""
    if not checkpoint and not (data / FOLDER).is_dir():
        refuse_missing(data)
        raise TaskError(
            f"there is no tokenizer in {data / FOLDER}: wordpiece.py {data} trains one, or set params.checkpoint"
        )
    transformers = _transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(checkpoint or data / FOLDER)
    except (OSError, ValueError) as error:
        raise _not_found(checkpoint or str(data / FOLDER), error) from None


def make_model(
    checkpoint: str,
    labels: Sequence[str],
    tokenizer: Any,
    max_length: int,
    sizes: Mapping[str, int],
    dropout: float | None,
) -> nn.Module:
    """Return a model with an output for each label.

    Args:
        checkpoint: a folder, or a name on the hub; a small DistilBERT if empty.
        labels: the names of the outputs, which are saved with it.
        tokenizer: whose tokens it reads.
        max_length: of a sample.
        sizes: of the small one, as DistilBertConfig calls them.
        dropout: None for the default.
    """
    transformers = _transformers()
    named = {"id2label": dict(enumerate(labels)), "label2id": {label: number for number, label in enumerate(labels)}}
    if not checkpoint:
        small = transformers.DistilBertConfig(
            vocab_size=len(tokenizer), max_position_embeddings=max_length, pad_token_id=tokenizer.pad_token_id,
            **SMALL, **sizes, **named,
        )  # fmt: skip
        made: nn.Module = transformers.DistilBertForTokenClassification(_dropping(small, dropout))
        return made
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint, **named)
        # RoBERTa's positions are two more than it can read; its tokenizer knows.
        longest = min(getattr(config, "max_position_embeddings", max_length), tokenizer.model_max_length)
        if max_length > longest:
            raise TaskError(f"params.max_length is {max_length}, and {checkpoint} reads {longest} tokens at most")
        loaded: nn.Module = transformers.AutoModelForTokenClassification.from_pretrained(
            checkpoint, config=_dropping(config, dropout), ignore_mismatched_sizes=True
        )
    except (OSError, ValueError) as error:
        raise _not_found(checkpoint, error) from None
    return loaded.float()


def _dropping(config: Any, dropout: float | None) -> Any:
    if dropout is None:
        return config
    known = [name for name in DROPOUTS if hasattr(config, name)]
    if not known:
        raise TaskError(
            f"params.dropout is {dropout}, and {type(config).__name__} has none that is known: leave it out"
        )
    for name in known:
        setattr(config, name, dropout)
    return config


def _not_found(checkpoint: str, error: Exception) -> TaskError:
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return TaskError(
        f"params.checkpoint: {checkpoint!r} cannot be loaded; give a folder that save_pretrained wrote, or a "
        f"model's name on the hub, which must be reachable or cached: {reason}"
    )


class Logits(nn.Module):
    """What is exported: the logits alone, as a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits
