"""Splitting image folders: what goes where, always the same, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from samestep.errors import TaskError
from tests.recipes.small import script

pytestmark = pytest.mark.usefixtures("recipe")


def split(sizes: dict[str, int], **options: Any) -> Any:
    from split import split

    return split({n: [Path(f"{n}/{i}.png") for i in range(s)] for n, s in sizes.items()}, **options)


def counts(classes: dict[str, list[Path]]) -> dict[str, int]:
    return {name: len(images) for name, images in classes.items()}


def write_images(folder: Path, **sizes: int) -> Path:
    for name, count in sizes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (4, 4), (number, 0, 0)).save(folder / name / f"{number}.png")
    return folder


def test_flat_takes_as_many_from_every_class_and_drops_small_ones() -> None:
    made = split({"a": 100, "b": 60, "c": 25}, mode="flat", val_share=0.1, min_per_class=20)
    # 185 images, 18 for validation, 6 of each class: c keeps 19.
    assert counts(made.valid) == {"a": 6, "b": 6}
    assert counts(made.train) == {"a": 94, "b": 54}
    assert made.notes == ("dropped 'c': 19 images would be left to train on, fewer than --min-per-class 20",)


def test_fixed_takes_the_same_share_of_every_class() -> None:
    made = split({"a": 100, "b": 25}, mode="fixed", val_share=0.2)
    assert counts(made.valid) == {"a": 20, "b": 5}
    assert counts(made.train) == {"a": 80, "b": 20}


def test_random_takes_the_share_of_all_images() -> None:
    made = split({"a": 100, "b": 50}, mode="random", val_share=0.2)
    assert sum(counts(made.valid).values()) == 30
    assert {n: len(made.train[n]) + len(made.valid[n]) for n in "ab"} == {"a": 100, "b": 50}


@pytest.mark.parametrize("mode", ["flat", "random", "fixed"])
def test_no_image_is_in_both_and_a_seed_decides(mode: str) -> None:
    sizes = {"a": 40, "b": 30}
    one, same, other = (split(sizes, mode=mode, val_share=0.2, seed=s) for s in (1, 1, 2))
    assert one == same
    assert one != other
    for name in sizes:
        assert not set(one.train[name]) & set(one.valid[name])


def test_large_classes_are_cut_to_a_multiple_of_the_smallest() -> None:
    made = split({"a": 1000, "b": 10}, mode="fixed", val_share=0.2, max_ratio=7)
    assert counts(made.train) == {"a": 56, "b": 8}


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(TaskError, match="one image only: 'b'"):
        split({"a": 10, "b": 1})
    with pytest.raises(TaskError, match=r"--val-share is 1\.5"):
        split({"a": 10, "b": 10}, val_share=1.5)
    with pytest.raises(TaskError, match="no validation image for 'b'"):
        split({"a": 100, "b": 4}, mode="fixed", max_ratio=100)
    with pytest.raises(TaskError, match="1 classes are left"):
        split({"a": 100, "b": 15}, mode="flat", max_ratio=100)
    with pytest.raises(TaskError, match="of 4 images is none"):
        split({"a": 2, "b": 2}, mode="random")


def test_the_command_copies_and_replaces_only_if_asked(tmp_path: Path) -> None:
    write_images(tmp_path / "images", a=10, b=10)
    words = ("images", "data", "--mode", "fixed", "--val-share", "0.2")
    tried = script("split.py", *words, "--dry-run", cwd=tmp_path)
    assert tried.stdout == "a: 8 train, 2 valid\nb: 8 train, 2 valid\n"
    assert not (tmp_path / "data").exists()
    assert script("split.py", *words, cwd=tmp_path).returncode == 0
    assert len(list((tmp_path / "data" / "train" / "a").iterdir())) == 8
    again = script("split.py", *words, cwd=tmp_path)
    assert (again.returncode, again.stderr) == (2, "split: data holds a split already: --force replaces it\n")
    assert script("split.py", *words, "--force", "--seed", "3", cwd=tmp_path).returncode == 0


def test_unreadable_images_are_named_and_skipped_only_if_asked(tmp_path: Path) -> None:
    write_images(tmp_path / "images", a=10, b=10)
    broken = tmp_path / "images" / "b" / "3.png"
    broken.write_bytes(broken.read_bytes()[:40])
    words = ("images", "data", "--mode", "fixed", "--val-share", "0.2")
    refused = script("split.py", *words, cwd=tmp_path)
    assert refused.returncode == 2
    assert "images/b/3.png cannot be read as an image" in refused.stderr
    assert "--skip-unreadable" in refused.stderr
    done = script("split.py", *words, "--skip-unreadable", cwd=tmp_path)
    assert "skipped images/b/3.png" in done.stderr
    assert "b: 8 train, 1 valid" in done.stdout
