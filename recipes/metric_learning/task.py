"""Two-stage supervised metric learning on image folders: a contrast, then a classifier on its encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from augmentation import Plain, training_transform
from folders import Images, list_classes
from networks import Classifier, Embedder, make_encoder
from safetensors.torch import load_file
from torch import Tensor, nn

from samestep import LaneBatch, Task
from samestep.errors import TaskError
from samestep.losses import supcon

if TYPE_CHECKING:
    from torchmetrics import Metric


class Folders(Task):
    """What both stages have in common: the images, and the encoder."""

    def __init__(
        self,
        data: str = "data",
        size: int = 32,
        backbone: str = "small",
        width: int = 16,
        pretrained: bool = False,
        albumentations: Sequence[Any] | None = None,
        unreadable: str = "error",
    ) -> None:
        """Args:
        data: what split.py wrote; relative to the working directory, as run directories are.
        size: images are resized to this many pixels.
        backbone: small, or timm:NAME.
        width: of the small one.
        pretrained: whether timm's comes with its weights.
        albumentations: transforms for training images, by name; ours if None.
        unreadable: error, or skip for images that cannot be read.
        """
        if unreadable not in ("error", "skip"):
            raise TaskError(f"params.unreadable is {unreadable!r}: give error or skip")
        self._data, self._skip = Path(data), unreadable == "skip"
        self._plain = Plain(size)
        self._size, self._albumentations = size, albumentations
        self._encoder = backbone, width, pretrained

    def encoder(self) -> Any:
        return make_encoder(*self._encoder)

    @cached_property
    def classes(self) -> list[str]:
        return list(list_classes(self._data / "train"))

    def train_images(self, views: int) -> Images:
        transform = training_transform(self._size, self._albumentations)
        found = Images.labelled(self._data / "train", transform, views, skip_unreadable=self._skip)
        found.refuse_single_images()
        return self._named(found)

    def valid_data(self) -> Images:
        found = Images.labelled(self._data / "valid", self._plain, 1, self.classes, skip_unreadable=self._skip)
        return self._named(found)

    def reference_data(self, name: str) -> Images | None:
        """Neighbours are sought among the training images as they are."""
        if name != "train":
            return super().reference_data(name)
        return Images.labelled(self._data / "train", self._plain, skip_unreadable=self._skip)

    def predict_data(self, source: str) -> Images:
        return self._named(Images.unlabelled(Path(source), self._plain, self._skip))

    def _named(self, images: Images) -> Images:
        """For predictions, which are written beside the names of the files."""
        self.files = [str(path) for path, _ in images.samples]
        return images


class FirstStage(Folders):
    """Two views of each image; images of one class shall be near to each other, all others far."""

    def __init__(self, embedding: int = 64, temperature: float = 0.1, **common: Any) -> None:
        super().__init__(**common)
        self.embedding, self.temperature = embedding, temperature

    def model(self) -> nn.Module:
        return Embedder(self.encoder(), self.embedding)

    def train_data(self) -> Images:
        return self.train_images(views=2)

    def embed(self, model: nn.Module, batch: LaneBatch) -> Tensor:
        return model(batch.x.flatten(0, 1)).unflatten(0, (len(batch), 2))

    def eval_embed(self, model: nn.Module, batch: LaneBatch) -> dict[str, Tensor]:
        encoded = model.encoder(batch.x)
        return {"head": model.head(encoded), "encoder": encoded}

    def batch_loss(self, embeddings: Tensor, batch: Any) -> Tensor:
        return supcon(embeddings, batch.y, self.temperature)


class SecondStage(Folders):
    """A classifier on the first stage's encoder, which stays as it is, its statistics included."""

    def __init__(self, first: str = "", smoothing: float = 0.01, **common: Any) -> None:
        """Args:
        first: the weights of the first stage: what `samestep average` wrote to its run.
        smoothing: of the labels.
        """
        super().__init__(**common)
        self._first, self.smoothing = Path(first), smoothing

    def model(self) -> nn.Module:
        model = Classifier(self.encoder(), len(self.classes))
        if not self._first.is_file():
            raise TaskError(
                f"params.first is {str(self._first)!r}, and there is no such file: train the first stage, "
                "and let samestep average write it"
            )
        saved = load_file(self._first)
        encoder = {
            name.removeprefix("encoder."): tensor for name, tensor in saved.items() if name.startswith("encoder.")
        }
        try:
            model.encoder.load_state_dict(encoder)
        except RuntimeError as error:
            raise TaskError(
                f"params.first: {self._first} holds another encoder than params.backbone and params.width say: {error}"
            ) from None
        return model

    def train_data(self) -> Images:
        return self.train_images(views=1)

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        loss = F.cross_entropy(model(batch.x), batch.y, reduction="sum", label_smoothing=self.smoothing)
        return loss, len(batch)

    def metrics(self) -> Mapping[str, Metric]:
        # Imported when it is first evaluated: torchmetrics takes seconds to import.
        from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

        classes = len(self.classes)
        return {
            "accuracy": MulticlassAccuracy(classes, average="micro"),
            "macro_f1": MulticlassF1Score(classes, average="macro"),
        }

    def evaluate(self, model: nn.Module, batch: LaneBatch, metrics: Mapping[str, Metric]) -> tuple[Tensor, int]:
        logits = model(batch.x)
        for metric in metrics.values():
            metric.update(logits, batch.y)
        return F.cross_entropy(logits, batch.y, reduction="sum"), len(batch)

    def eval_embed(self, model: nn.Module, batch: LaneBatch) -> Tensor:
        return model.encoder(batch.x)

    def predict(self, model: nn.Module, batch: LaneBatch) -> dict[str, Any]:
        scores, names = model(batch.x).softmax(1), self.classes
        return {
            "file": [self.files[index] for index in batch.ids],
            "label": [names[number] for number in scores.argmax(1).tolist()],
            "probability": scores.amax(1),
            **{f"p_{name}": scores[:, number] for number, name in enumerate(names)},
        }
