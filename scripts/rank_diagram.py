"""Draw docs/images/ranks.svg (machines, their GPUs, ranks and lanes, and who exchanges what with whom), with --owners
docs/images/owners.svg (what each rank holds with distributed.shard: optimizer, and when it is sent), or with --weights
docs/images/weights.svg (the weights that each rank holds with distributed.shard: weights, and when)."""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "ranks.svg"
OWNERS, WEIGHTS = PICTURE.with_name("owners.svg"), PICTURE.with_name("weights.svg")
_COLOURS = ("#dcebfb", "#e3f2e6", "#fbead2", "#eee3f7")
_IN_THE_DARK = {
    "#ffffff": "#12171c", "#f1f4f7": "#1b222a", "#dcebfb": "#1f3a56", "#e3f2e6": "#1d4029", "#fbead2": "#553a14",
    "#eee3f7": "#41295a",
}  # fmt: skip
"""Each colour of an area, where the reader has chosen a dark page."""
"""Of the owners."""
_GPU_WIDTH, _GPU_HEIGHT, _GAP, _TOP = 92, 84, 12, 64


def diagram(machines: int = 3, gpus: int = 3, lanes: int = 18) -> str:
    """Return an SVG of so many machines with so many GPUs each; one rank on each GPU."""
    inside = gpus * (_GPU_WIDTH + _GAP) + _GAP
    width = machines * (inside + 2 * _GAP) + 2 * _GAP
    bottom = _TOP + _GPU_HEIGHT + 46
    parts = [_text(width / 2, 26, f"one step: a global batch in {lanes} lanes", size=15)]
    world = machines * gpus
    for machine in range(machines):
        left = 2 * _GAP + machine * (inside + 2 * _GAP)
        parts.append(_box(left, _TOP - 22, inside, _GPU_HEIGHT + 36, "#f1f4f7"))
        parts.append(_text(left + inside / 2, _TOP - 6, f"machine {machine}"))
        for gpu in range(gpus):
            rank = machine * gpus + gpu
            x = left + _GAP + gpu * (_GPU_WIDTH + _GAP)
            first, last = rank * lanes // world, (rank + 1) * lanes // world - 1
            parts.append(_box(x, _TOP + 4, _GPU_WIDTH, _GPU_HEIGHT, "#dcebfb"))
            for line, text in enumerate((f"rank {rank}", f"GPU {gpu}", f"lanes {first}-{last}")):
                parts.append(_text(x + _GPU_WIDTH / 2, _TOP + 28 + 22 * line, text))
            parts.append(_line(x + _GPU_WIDTH / 2, _TOP + 4 + _GPU_HEIGHT, bottom))
    parts.append(_box(2 * _GAP, bottom, width - 4 * _GAP, 34, "#e3f2e6"))
    sentence = "gradients of all lanes, added in one order (nccl between GPUs, gloo between CPUs)"
    parts.append(_text(width / 2, bottom + 22, sentence))
    after = "then every rank makes the same update; rank 0 writes checkpoints, metrics and trackers"
    parts.append(_text(width / 2, bottom + 58, after))
    return _picture(parts, width, bottom + 72)


def owners_diagram(world: int = 4) -> str:
    """Return an SVG of what so many ranks hold, and of what they send in a step."""
    each, left, row = 150, 130, 46
    width = left + world * (each + _GAP)
    parts = [_text(width / 2, 24, "who holds what between two steps", size=15)]
    for at, what in enumerate(("weights", "gradients", "optimizer states")):
        parts.append(_text(left / 2, 79 + at * row, what))
    for rank in range(world):
        x, part = left + rank * (each + _GAP), each / world
        parts.append(_text(x + each / 2, 48, f"rank {rank}"))
        for owner in range(world):
            place, colour = x + owner * part, _COLOURS[owner % len(_COLOURS)]
            parts.append(_box(place, 58, part, 32, colour))
            fill = colour if owner == rank else "#ffffff"
            parts += [_box(place, 58 + at * row, part, 32, fill) for at in (1, 2)]
    steps = (
        "backward: each bucket of gradients leaves for its owners, who add it up in the tree's order",
        "clipping: one number per parameter is sent, and every rank has the norm of all",
        "update: an owner steps its own parameters, then sends their weights to all ranks",
    )
    bottom = 58 + 3 * row
    parts += [_text(width / 2, bottom + 20 + 24 * at, text) for at, text in enumerate(steps)]
    return _picture(parts, width, bottom + 86)


def weights_diagram(world: int = 4, blocks: int = 4) -> str:
    """Return an SVG of the weights that so many ranks hold while a model of so many blocks runs."""
    each, left, row = 150, 190, 42
    width = left + world * (each + _GAP)
    parts = [_text(width / 2, 24, "which weights a rank holds; each block has parts of all owners", size=15)]
    moments: list[tuple[str, tuple[int, ...]]] = [
        ("between two steps", ()),
        ("block 1 runs, 2 arrives", (0, 1)),
        ("block 2 runs, 3 arrives", (1, 2)),
        ("block 4 runs, then back", (3,)),
        ("backward of 3, 2 arrives", (2, 1)),
    ]
    for at, (what, _) in enumerate(moments):
        parts.append(_text(left / 2, 78 + at * row, what))
    for rank in range(world):
        x, block = left + rank * (each + _GAP), each / blocks
        parts.append(_text(x + each / 2, 48, f"rank {rank}"))
        for at, (_, gathered) in enumerate(moments):
            for number in range(blocks):
                for owner in range(world):
                    is_here = owner == rank or number in gathered
                    fill = _COLOURS[owner % len(_COLOURS)] if is_here else "#ffffff"
                    part = (block - 4) / world
                    place = x + number * block + owner * part
                    parts.append(_box(place, 58 + at * row, part, 30, fill))
    return _picture(parts, width, 70 + len(moments) * row)


def _picture(parts: list[str], width: float, height: float) -> str:
    body = "\n".join(parts)
    dark = " ".join(f'rect[fill="{light}"] {{ fill: {colour} }}' for light, colour in _IN_THE_DARK.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif">\n'
        f"<style>@media (prefers-color-scheme: dark) {{ {dark} text {{ fill: #e2e8ee }} line {{ stroke: #8d99a5 }} }}</style>\n"
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="#8794a3"/>'


def _text(x: float, y: float, text: str, size: int = 13) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="middle">{escape(text)}</text>'


def _line(x: float, top: float, bottom: float) -> str:
    return f'<line x1="{x:g}" y1="{top:g}" x2="{x:g}" y2="{bottom:g}" stroke="#4a5663"/>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=3)
    parser.add_argument("--lanes", type=int, default=18)
    parser.add_argument("--owners", action="store_true")
    parser.add_argument("--weights", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.owners:
        drawn, place = owners_diagram(), OWNERS
    elif args.weights:
        drawn, place = weights_diagram(), WEIGHTS
    else:
        drawn, place = diagram(args.machines, args.gpus, args.lanes), PICTURE
    output = args.output or place
    output.write_text(drawn, encoding="utf-8")
