"""The recipe's data, networks and augmentation, and what each refuses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from samestep.errors import MissingExtraError, TaskError
from tests.recipes.test_split import write_images

pytestmark = pytest.mark.usefixtures("recipe")


def test_folders_that_hold_no_classes_are_refused_by_what_they_hold(tmp_path: Path) -> None:
    from folders import list_classes

    with pytest.raises(TaskError, match="there is no folder"):
        list_classes(tmp_path / "none")
    with pytest.raises(TaskError, match="holds nothing: each class must be a folder"):
        list_classes(tmp_path)
    Image.new("RGB", (4, 4)).save(tmp_path / "loose.png")
    with pytest.raises(TaskError, match="holds 1 images without labels"):
        list_classes(tmp_path)
    write_images(tmp_path, a=2)
    with pytest.raises(TaskError, match="one class only, 'a'"):
        list_classes(tmp_path)
    (tmp_path / "b").mkdir()
    with pytest.raises(TaskError, match="folders without images: 'b'"):
        list_classes(tmp_path)


def test_a_class_of_one_image_and_an_unknown_class_are_refused(tmp_path: Path) -> None:
    from augmentation import Plain
    from folders import Images

    write_images(tmp_path, a=3, b=1)
    with pytest.raises(TaskError, match="fewer than two images to train on: 'b'"):
        Images.labelled(tmp_path, Plain(4)).refuse_single_images()
    with pytest.raises(TaskError, match="classes that the training set has not: 'b'"):
        Images.labelled(tmp_path, Plain(4), classes=["a", "c"])


def test_an_unreadable_image_ends_a_run_by_name_or_is_left_out(tmp_path: Path) -> None:
    from augmentation import Plain
    from folders import Images

    write_images(tmp_path, a=3, b=3)
    (tmp_path / "a" / "1.png").write_text("no image")
    with pytest.raises(TaskError, match=r"a/1\.png cannot be read.*params\.unreadable=skip"):
        Images.labelled(tmp_path, Plain(4))[1]
    assert len(Images.labelled(tmp_path, Plain(4), skip_unreadable=True)) == 5
    assert len(Images.unlabelled(tmp_path, Plain(4), skip_unreadable=True)) == 5
    with pytest.raises(TaskError, match="holds no images"):
        Images.unlabelled(write_images(tmp_path / "empty", c=0), Plain(4))


def test_views_are_drawn_each_by_itself_from_torchs_generator(tmp_path: Path) -> None:
    from augmentation import Augmented
    from folders import Images

    images = Images.labelled(write_images(tmp_path, a=2, b=2), Augmented(8), views=2)
    torch.manual_seed(3)
    first, label = images[0]
    torch.manual_seed(3)
    again, _ = images[0]
    assert first.shape == (2, 3, 8, 8)
    assert label == 0
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])


def test_the_second_stages_encoder_is_frozen_with_its_statistics() -> None:
    from networks import Classifier, SmallEncoder

    model = Classifier(SmallEncoder(4), 3).train()
    before = {name: value.clone() for name, value in model.encoder.state_dict().items()}
    model(torch.randn(8, 3, 16, 16)).sum().backward()
    assert all(torch.equal(value, before[n]) for n, value in model.encoder.state_dict().items())
    assert all(p.grad is None for p in model.encoder.parameters())
    assert model.classifier.training
    assert model.classifier.weight.grad is not None


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from augmentation import training_transform
    from networks import make_encoder

    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "albumentations", None)
    with pytest.raises(MissingExtraError, match=r"params.backbone=timm:resnet18 needs packages"):
        make_encoder("timm:resnet18", 16, pretrained=False)
    with pytest.raises(MissingExtraError, match=r"params.albumentations needs packages"):
        training_transform(16, [])
    with pytest.raises(TaskError, match="'resnet18': give small, or timm:"):
        make_encoder("resnet18", 16, pretrained=False)


def test_a_timm_backbone_gives_its_features() -> None:
    pytest.importorskip("timm", reason="timm is not installed")
    from networks import Embedder, make_encoder

    encoder = make_encoder("timm:resnet10t", 0, pretrained=False)
    assert Embedder(encoder, 6)(torch.randn(2, 3, 32, 32)).shape == (2, 6)
    with pytest.raises(TaskError, match=r"params\.backbone=timm:none"):
        make_encoder("timm:none", 0, pretrained=False)


def test_albumentations_come_from_yaml_and_follow_torchs_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # OpenCV changes it
    pytest.importorskip("albumentations", reason="albumentations is not installed")
    from augmentation import training_transform

    entries = [
        {"RandomResizedCrop": {"size": [16, 16], "scale": [0.5, 1.0]}},
        {"OneOf": {"transforms": ["HorizontalFlip", {"MedianBlur": {"blur_limit": [3, 3]}}], "p": 0.5}},
    ]
    transform = training_transform(16, entries)
    image = Image.effect_noise((24, 24), 80).convert("RGB")
    torch.manual_seed(1)
    one, other = transform(image), transform(image)
    torch.manual_seed(1)
    assert torch.equal(transform(image), one)
    assert not torch.equal(one, other)
    for wrong, message in (
        ("Nothing", "'Nothing', which albumentations does not have"),
        ([1], r"the entry \[1\]"),
        ({"HorizontalFlip": {"p": "often"}}, "HorizontalFlip does not take"),
    ):
        with pytest.raises(TaskError, match=message):
            training_transform(16, [wrong])


@pytest.mark.parametrize(("mode", "largest"), [("I;16", 65535), ("I", 65535), ("F", 1.0)])
def test_deep_images_are_scaled_and_not_cut_off(tmp_path: Path, mode: str, largest: float) -> None:
    """Pillow's own conversion keeps the lowest 8 bits, or makes all of it black."""
    import numpy as np
    from folders import read_image
    from PIL import Image

    kinds = {"I;16": np.uint16, "I": np.int32, "F": np.float32}
    ramp = np.linspace(0, largest, 256).reshape(16, 16).astype(kinds[mode])
    path = tmp_path / ("deep.png" if mode == "I;16" else "deep.tif")
    Image.fromarray(ramp).save(path)
    found = np.asarray(read_image(path))
    assert found.shape == (16, 16, 3)
    assert np.abs(found[..., 0].astype(int).ravel() - np.arange(256)).max() <= 1
    Image.fromarray(np.full((2, 2), -3.0, np.float32)).save(tmp_path / "odd.tif")
    with pytest.raises(TaskError, match=r"its pixels are from -3 to -3"):
        read_image(tmp_path / "odd.tif")
