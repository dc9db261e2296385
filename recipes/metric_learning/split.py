"""Splits folders of images, one for each class, into a training and a validation set.

python recipes/metric_learning/split.py images data --mode fixed --val-share 0.2

flat    as many validation images from every class
random  validation images drawn from all images, whatever their class
fixed   the same share of every class

Of a class at most --max-ratio times as many images are used as the smallest class has.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from folders import list_classes, unreadable

from samestep.errors import OutputError, SamestepError, TaskError

Classes = dict[str, list[Path]]


@dataclass(frozen=True)
class Split:
    """Which images go where, by class, and what was left out."""

    train: Classes
    valid: Classes
    notes: tuple[str, ...] = ()


def split(
    classes: Classes,
    mode: str = "flat",
    val_share: float = 0.1,
    max_ratio: float = 7,
    min_per_class: int = 20,
    seed: int = 42,
) -> Split:
    """Deal the images of each class out; the same for the same seed.

    Args:
        classes: the images of each class.
        mode: flat, random or fixed.
        val_share: how much of the images is for validation.
        max_ratio: how many times the smallest class's images are used of any class, at most.
        min_per_class: flat drops classes that are left with fewer training images than this.
        seed: of the draws.

    Raises:
        TaskError: if a class would have no images to train on, or none to validate with.
    """
    if not 0 < val_share < 1:
        raise TaskError(f"--val-share is {val_share}: give a share between 0 and 1")
    single = [name for name, images in classes.items() if len(images) < 2]
    if single:
        raise TaskError(
            f"these classes have one image only: {', '.join(map(repr, single))}. It cannot be trained "
            "on and validated with: add images, or remove the classes"
        )
    most = int(max_ratio * min(map(len, classes.values())))
    # Each class by a draw of its own: another class's images change nothing for it.
    used = {
        name: random.Random(f"{seed} {name}").sample(images, min(most, len(images))) for name, images in classes.items()
    }
    if mode == "random":
        return _pooled(used, val_share, seed)
    total = sum(map(len, used.values()))
    per_class = int(int(total * val_share) / len(used))
    counts = {name: per_class if mode == "flat" else int(len(images) * val_share) for name, images in used.items()}
    kept = {
        name: images for name, images in used.items() if mode != "flat" or len(images) - counts[name] >= min_per_class
    }
    notes = tuple(
        f"dropped {name!r}: {max(len(used[name]) - counts[name], 0)} images would be left to train on, "
        f"fewer than --min-per-class {min_per_class}"
        for name in used
        if name not in kept
    )
    return _checked(
        {name: images[counts[name] :] for name, images in kept.items()},
        {name: images[: counts[name]] for name, images in kept.items()},
        notes,
        val_share,
    )


def _pooled(used: Classes, val_share: float, seed: int) -> Split:
    everything = [(name, path) for name, images in used.items() for path in images]
    drawn = set(random.Random(seed).sample(everything, int(len(everything) * val_share)))
    train, valid = (
        {name: [path for path in images if ((name, path) in drawn) is held_out] for name, images in used.items()}
        for held_out in (False, True)
    )
    if not drawn:
        raise TaskError(f"--val-share {val_share} of {len(everything)} images is none: raise it")
    untrained = [name for name, images in train.items() if not images]
    if untrained:
        raise TaskError(
            f"all images of {', '.join(map(repr, untrained))} were drawn for validation: use --mode "
            "fixed, a smaller --val-share or another --seed"
        )
    notes = tuple(f"no image of {name!r} to validate with" for name in valid if not valid[name])
    return Split(train, {name: images for name, images in valid.items() if images}, notes)


def _checked(train: Classes, valid: Classes, notes: tuple[str, ...], val_share: float) -> Split:
    if len(train) < 2:
        raise TaskError(f"{len(train)} classes are left ({'; '.join(notes)}): lower --min-per-class, or add images")
    without = [name for name, images in valid.items() if not images]
    if without:
        raise TaskError(
            f"--val-share {val_share} leaves no validation image for {', '.join(map(repr, without))}: "
            "raise it, or add images"
        )
    return Split(train, valid, notes)


def copy(made: Split, output: Path) -> None:
    """Copy the images into `output/train` and `output/valid`."""
    for part, classes in (("train", made.train), ("valid", made.valid)):
        for name, images in classes.items():
            folder = output / part / name
            folder.mkdir(parents=True, exist_ok=True)
            for path in images:
                shutil.copy2(path, folder / path.name)


def run(given: argparse.Namespace) -> None:
    """Do what the command line says."""
    classes = list_classes(given.images)
    wrong = unreadable([path for images in classes.values() for path in images])
    for message in wrong.values():
        if not given.skip_unreadable:
            raise TaskError(f"{message} ({len(wrong)} such files)")
    readable = {n: [p for p in images if p not in wrong] for n, images in classes.items()}
    emptied = [name for name, images in readable.items() if not images]
    if emptied:
        raise TaskError(f"no image of {', '.join(map(repr, emptied))} can be read")
    made = split(readable, given.mode, given.val_share, given.max_ratio, given.min_per_class, given.seed)
    for path in wrong:
        print(f"split: skipped {path}, which cannot be read", file=sys.stderr)
    for note in made.notes:
        print(f"split: {note}", file=sys.stderr)
    for name in made.train:
        print(f"{name}: {len(made.train[name])} train, {len(made.valid.get(name, []))} valid")
    if given.dry_run:
        return
    there = [part for part in ("train", "valid") if (given.data / part).exists()]
    if there and not given.force:
        raise OutputError(f"{given.data} holds a split already: --force replaces it")
    for part in there:
        shutil.rmtree(given.data / part)
    copy(made, given.data)
    print(f"wrote {given.data}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Split image folders for training and validation.")
    parser.add_argument("images", type=Path, help="what holds a folder for each class")
    parser.add_argument("data", type=Path, help="where train/ and valid/ go")
    parser.add_argument("--mode", choices=["flat", "random", "fixed"], default="flat")
    parser.add_argument("--val-share", type=float, default=0.1)
    parser.add_argument("--max-ratio", type=float, default=7)
    parser.add_argument("--min-per-class", type=int, default=20)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--skip-unreadable", action="store_true")
    parser.add_argument("--dry-run", action="store_true", help="print the counts, copy nothing")
    parser.add_argument("--force", action="store_true", help="replace an earlier split")
    try:
        run(parser.parse_args())
    except SamestepError as error:
        print(f"split: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
