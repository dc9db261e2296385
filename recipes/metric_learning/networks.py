"""An encoder with a projection head, for the first stage, and with a classifier, for the second."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from samestep.errors import MissingExtraError, TaskError


class SmallEncoder(nn.Sequential):
    """Four convolutions, each with BatchNorm; `features` numbers of an image."""

    def __init__(self, width: int) -> None:
        self.features = 4 * width
        super().__init__(
            *_block(3, width, 1),
            *_block(width, 2 * width, 2),
            *_block(2 * width, 4 * width, 2),
            *_block(4 * width, 4 * width, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )


def _block(before: int, after: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(after), nn.ReLU()]


def make_encoder(backbone: str, width: int, pretrained: bool) -> Any:
    """`small`, or `timm:NAME`; its `features` is how many numbers it gives of an image."""
    if backbone == "small":
        return SmallEncoder(width)
    kind, _, name = backbone.partition(":")
    if kind != "timm" or not name:
        raise TaskError(f"params.backbone is {backbone!r}: give small, or timm: and a model's name")
    try:
        import timm
    except ImportError:
        raise MissingExtraError(f"params.backbone={backbone}", "timm") from None
    try:
        encoder = timm.create_model(name, pretrained=pretrained, num_classes=0, global_pool="avg")
    except RuntimeError as error:
        raise TaskError(f"params.backbone={backbone}: {error}") from None
    encoder.features = encoder.num_features
    return encoder


class Embedder(nn.Module):
    """First stage: an encoder, and a head that the contrast is trained on and nothing else."""

    def __init__(self, encoder: Any, size: int) -> None:
        super().__init__()
        self.encoder = encoder
        features = encoder.features
        self.head = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, size))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(images))


class Classifier(nn.Module):
    """Second stage: a linear classifier on the features of an encoder that no longer changes.

    `requires_grad` alone would not do: BatchNorm's statistics move with every pass in training mode.
    """

    def __init__(self, encoder: Any, classes: int) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(False)
        self.classifier = nn.Linear(encoder.features, classes)

    def train(self, mode: bool = True) -> Classifier:
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.encoder(images))
