"""Token classification: entities in documents, by a transformer with a label for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from documents import TYPES, read_documents, refuse_missing
from entity_metrics import EntityF1, PerEntity, TokenMacroF1
from networks import Logits, load_tokenizer, make_model
from tags import IGNORED, Encoder, Sample, entities_of, labels_of
from torch import Tensor, nn
from torch.utils.data import Dataset

from samestep import LaneBatch, Task
from samestep.errors import TaskError


class Samples(Dataset[Sample]):
    """Documents as tokens; `labels` are the types that each has, for folds that are alike."""

    def __init__(self, samples: Sequence[Sample], names: Sequence[str]) -> None:
        self._samples = list(samples)
        self.documents = [sample.document for sample in self._samples]
        kinds = [{names[n].partition("-")[2] for n in s.labels if n > 0} for s in self._samples]
        self.labels = [sorted(kind) for kind in kinds]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]


class Entities(Task):
    def __init__(
        self,
        data: str = "data",
        types: Sequence[str] = TYPES,
        checkpoint: str = "",
        max_length: int = 128,
        dim: int = 64,
        layers: int = 2,
        heads: int = 4,
        dropout: float | None = None,
    ) -> None:
        """Args:
        data: the folder with train.jsonl and valid.jsonl; relative to the working directory, as run directories are.
        types: of entities.
        checkpoint: a folder, or a name on the hub, of a model of transformers with its tokenizer. If empty: a small
            DistilBERT with new weights, and the tokenizer in the data's folder.
        max_length: tokens of a sample, special ones included; longer documents are cut into several.
        dim: of the small model; its hidden layers have four times as many.
        layers: of the small model.
        heads: of attention in the small model.
        dropout: of hidden layers; the checkpoint's own, or 0.1, if None.
        """
        if not types or len(set(types)) < len(types):
            raise TaskError(f"params.types is {list(types)}: give each type of entity once")
        self._data, self._types, self._checkpoint = Path(data), list(types), checkpoint
        self._labels = labels_of(self._types)
        self._max_length = max_length
        self._sizes = {"dim": dim, "n_layers": layers, "n_heads": heads, "hidden_dim": 4 * dim}
        self._dropout = dropout

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self._checkpoint, self._data)

    def prepare_data(self) -> None:
        """The checkpoint's download, on one rank of each node; the others find it in the cache."""
        refuse_missing(self._data)
        if self._checkpoint:
            self.model()

    def model(self) -> nn.Module:
        return make_model(self._checkpoint, self._labels, self.tokenizer, self._max_length, self._sizes, self._dropout)

    def train_data(self) -> Samples:
        return self._read(self._data / "train.jsonl")

    def valid_data(self) -> Samples:
        return self._read(self._data / "valid.jsonl")

    def predict_data(self, source: str) -> Samples:
        return self._read(Path(source))

    def _read(self, path: Path) -> Samples:
        encoder = Encoder(self.tokenizer, self._labels, self._max_length)
        return Samples(encoder.samples(read_documents(path, self._types)), self._labels)

    def fold_groups(self, dataset: Samples) -> list[int] | None:
        """Parts of one document belong into one fold; where all are whole, folds can be alike in types."""
        whole = len(set(dataset.documents)) == len(dataset)
        return None if whole else dataset.documents

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """Padded to the longest of the lane: the same at any number of ranks."""
        longest = max(len(sample.ids) for sample in samples)

        def padded(rows: list[Any], value: Any) -> Tensor:
            return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])

        ids = [sample.ids for sample in samples]
        return {
            "input_ids": padded(ids, self.tokenizer.pad_token_id or 0),  # which the mask leaves out
            "attention_mask": padded([[1] * len(row) for row in ids], 0),
            "labels": padded([sample.labels for sample in samples], IGNORED),
            "offsets": padded([sample.offsets for sample in samples], (0, 0)),
            "document": torch.tensor([sample.document for sample in samples]),
        }

    def model_inputs(self, batch: LaneBatch, method: str = "forward") -> tuple[Tensor, Tensor]:
        return batch.data["input_ids"], batch.data["attention_mask"]

    def export_model(self, model: nn.Module) -> nn.Module:
        return Logits(model)

    def _logits(self, model: nn.Module, batch: LaneBatch) -> Tensor:
        ids, mask = self.model_inputs(batch)
        logits: Tensor = model(input_ids=ids, attention_mask=mask).logits
        return logits

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Tensor]:
        return self._loss(self._logits(model, batch), batch)

    def _loss(self, logits: Tensor, batch: LaneBatch) -> tuple[Tensor, Tensor]:
        """Summed over tokens, which are what it is a mean of: lanes have different numbers of them."""
        labels = batch.data["labels"]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return loss, (labels != IGNORED).sum()

    def metrics(self) -> dict[str, Any]:
        return {
            "macro_f1": TokenMacroF1(self._types),
            "entity_f1": EntityF1(self._types),
            "per_entity": PerEntity(self._types),
        }

    def evaluate(self, model: nn.Module, batch: LaneBatch, metrics: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        logits = self._logits(model, batch)
        predicted = logits.argmax(-1)
        for metric in metrics.values():
            metric.update(predicted, batch.data["labels"])
        return self._loss(logits, batch)

    def predict(self, model: nn.Module, batch: LaneBatch) -> dict[str, Any]:
        """Return the document's number, and its entities as annotations are written."""
        predicted = self._logits(model, batch).argmax(-1).cpu()
        rows = zip(predicted, batch.data["labels"].cpu(), batch.data["offsets"].tolist(), strict=True)
        return {"document": batch.data["document"], "entities": [self._annotations(*row) for row in rows]}

    def _annotations(self, numbers: Tensor, labels: Tensor, offsets: Any) -> list[list[Any]]:
        kept = (labels != IGNORED).nonzero().flatten().tolist()
        found = entities_of([self._labels[int(numbers[place])] for place in kept])
        return [[offsets[kept[start]][0], offsets[kept[end - 1]][1], kind] for start, end, kind in found]
