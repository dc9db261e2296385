"""Files with made-up data that some of the scripts read."""

from __future__ import annotations

import gzip
import pickle
import random
from pathlib import Path

import numpy


def make_data(name: str, folder: Path) -> None:
    """Write what a script reads, if it reads any.

    Args:
        name: Of the script.
        folder: Where it is.
    """
    maker = {"unet": _images, "nanogpt": _tokens, "enwik8": _bytes, "ner": _sentences}.get(name)
    if maker is not None:
        maker(folder, numpy.random.RandomState(0))


def _images(folder: Path, draw: numpy.random.RandomState) -> None:
    from PIL import Image

    for kind in ("imgs", "masks"):
        (folder / "data" / kind).mkdir(parents=True, exist_ok=True)
        (folder / "data" / kind / ".keep").unlink(missing_ok=True)
    for at in range(30):
        pixels = draw.randint(0, 255, (32, 32, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / f"data/imgs/a{at}.jpg")
        mask = (draw.rand(32, 32) > 0.5).astype(numpy.uint8) * 255
        Image.fromarray(mask).convert("L").save(folder / f"data/masks/a{at}_mask.gif")


def _tokens(folder: Path, draw: numpy.random.RandomState) -> None:
    place = folder / "data/toy"
    place.mkdir(parents=True, exist_ok=True)
    for part in ("train", "val"):
        draw.randint(0, 60, 4000).astype(numpy.uint16).tofile(place / f"{part}.bin")
    (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64}))


def _bytes(folder: Path, draw: numpy.random.RandomState) -> None:
    (folder / "data").mkdir(exist_ok=True)
    with gzip.open(folder / "data/enwik8.gz", "wb") as file:
        file.write(bytes(draw.randint(32, 120, 5000).astype(numpy.uint8)))


def _sentences(folder: Path, draw: numpy.random.RandomState) -> None:
    import torch
    from transformers import BertConfig, BertForTokenClassification

    words = [f"w{at}" for at in range(40)]
    tags = ["O", "B-PER", "I-PER", "B-LOC", "B-ORG", "B-MISC"]
    choose = random.Random(0)
    (folder / "data").mkdir(exist_ok=True)
    for part, count in (("train", 52), ("valid", 10), ("test", 10)):
        lines = ["-DOCSTART- -X- -X- O", ""]
        for _ in range(count):
            length = choose.randint(3, 9)
            lines += [f"{choose.choice(words)} X X {choose.choice(tags)}" for _ in range(length)]
            lines.append("")
        (folder / f"data/{part}.txt").write_text("\n".join(lines) + "\n")
    (folder / "bert").mkdir(exist_ok=True)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "bert/vocab.txt").write_text("\n".join(special + words))
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=50, intermediate_size=32, max_position_embeddings=32, num_labels=12, **shape)
    BertForTokenClassification(config).save_pretrained(folder / "bert")
