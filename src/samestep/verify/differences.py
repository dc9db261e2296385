"""The distance of two runs: in steps, in tensors, in units in the last place (ULP)."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.errors import ConfigError, Mistake, TextError
from samestep.parsing.files import read_text
from samestep.parsing.json_text import read_json_lines
from samestep.parsing.limits import short
from samestep.pytree import same_bits
from samestep.run.saved_files import Saved
from samestep.run.state_tensors import MODULES
from samestep.train.record import RunRecord
from samestep.words import counted

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


@dataclass(frozen=True)
class Difference:
    """The place where two runs first differ, and by how much."""

    what: str
    """samples, loss, state, steps, or states of the ranks."""
    step: int | None = None
    """The first step that differs; None if only the final state does."""
    tensor: str | None = None
    """The tensor of the final state that differs most."""
    ulp: int | None = None
    relative: float | None = None

    def __str__(self) -> str:
        parts = [self.what if self.step is None else f"{self.what} from step {self.step} on"]
        if self.tensor is not None:
            parts.append(self.tensor)
        if self.ulp is not None:
            parts.append(f"{self.ulp:,} ULP")
        if self.relative is not None:
            parts.append(f"{self.relative:.2g} relative")
        return ", ".join(parts)


def ulp_distance(left: Tensor, right: Tensor) -> int:
    """Return the largest distance of two tensors' elements, in representable values between them."""
    if not left.numel():
        return 0
    a, b = _ordered(_real(left)).flatten(), _ordered(_real(right)).flatten()
    if bool((_real(left).isnan() != _real(right).isnan()).any()):
        return 2**63 - 1
    # The furthest pair by an estimate that cannot overflow, then exactly.
    furthest = int((a.to(torch.float64) - b.to(torch.float64)).abs().argmax())
    return abs(int(a[furthest]) - int(b[furthest]))


def _real(values: Tensor) -> Tensor:
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def _ordered(values: Tensor) -> Tensor:
    """Integers in the order of the floats: neighbours are one apart, and both zeros are 0."""
    if values.dtype not in _BITS:
        return values.to(torch.int64)
    bits = values.contiguous().view(_BITS[values.dtype]).to(torch.int64)
    lowest = -(1 << (values.element_size() * 8 - 1))
    return torch.where(bits < 0, lowest - bits, bits)


def relative_distance(left: Tensor, right: Tensor) -> float:
    """Return the norm of two tensors' difference, relative to the norm of the first."""
    a, b = _real(left).to(torch.float64), _real(right).to(torch.float64)
    gap, size = float((a - b).norm()), float(a.norm())
    if gap == 0.0:
        return 0.0
    return gap / size if size else math.inf


def different_tensors(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that two states do not share bit for bit."""
    names = left.keys() | right.keys()
    return [name for name in names if name not in left or name not in right or not same_bits(left[name], right[name])]


def furthest_tensor(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Difference | None:
    """Return the tensor of two states that differs most, in ULP; None if all bits are the same."""
    worst: Difference | None = None
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            return Difference("state", tensor=f"{name} (in one run only)")
        a, b = left[name], right[name]
        if same_bits(a, b):
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return Difference("state", tensor=f"{name} (shape or type)")
        found = Difference("state", tensor=name, ulp=ulp_distance(a, b), relative=relative_distance(a, b))
        if worst is None or (found.ulp or 0) > (worst.ulp or 0):
            worst = found
    return worst


def model_distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """Return the relative distance of two states' weights and buffers, taken as one vector.

    As one vector, because a single tensor can be all rounding: the gradient of a bias before
    BatchNorm is zero but for rounding errors, which Adam then scales up to whole steps.
    """
    names = sorted(name for name in left if name.startswith(MODULES))
    if names != sorted(name for name in right if name.startswith(MODULES)):
        return math.inf
    flat = [torch.cat([_real(state[name]).to(torch.float64).flatten() for name in names]) for state in (left, right)]
    return relative_distance(*flat)


def first_loss_difference(left: Sequence[float], right: Sequence[float], rtol: float = 0.0) -> Difference | None:
    """Return the first step whose losses differ by more than `rtol`, relative to the first curve."""
    for step, (a, b) in enumerate(zip(left, right, strict=False)):
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        relative = abs(a - b) / abs(a) if a else math.inf
        if not relative <= rtol:
            pair = torch.tensor([[a], [b]], dtype=torch.float64)
            return Difference("loss", step, ulp=ulp_distance(pair[0], pair[1]), relative=relative)
    if len(left) != len(right):
        return Difference("steps", min(len(left), len(right)))
    return None


def thread_difference(left: RunRecord, right: RunRecord) -> str:
    """Return a note on other numbers of threads, on which the bits of CPUs depend; empty if there is none."""
    first, second = set(left.threads), set(right.threads)
    if first == second:
        return ""
    shown = [" and ".join(map(str, sorted(found))) for found in (second, first)]
    return (
        f"{counted(shown[0], 'thread')} per rank, not {shown[1]} as in the first run: on CPUs that alone can "
        "change bits. Set distributed.threads_per_rank"
    )


def saved_difference(left: Saved, right: Saved) -> Difference | None:
    """Return the first tensor that differs in a file which the script has saved in both runs."""
    for name in sorted(left.tensors.keys() & right.tensors.keys()):
        if left.tensors[name] != right.tensors[name]:
            return Difference("what the script saves", tensor=name)
    return None


def file_difference(left: Saved, right: Saved) -> str:
    """Return a note on other files of the script that differ, as logs with times do; empty if none does."""
    common = sorted(left.files.keys() & right.files.keys())
    other = [name for name in common if left.files[name] != right.files[name]]
    if not other:
        return ""
    shown = ", ".join(other[:3]) + (", ..." if len(other) > 3 else "")
    return f"the script wrote other content to {shown}: look whether it should be the same"


def first_sample_difference(left: RunRecord, right: RunRecord) -> Difference | None:
    """Return the first step that did not consume the same samples."""
    start = max(left.start, right.start)
    pairs = zip(left.samples[start - left.start :], right.samples[start - right.start :], strict=False)
    for step, (a, b) in enumerate(pairs, start):
        if a != b:
            return Difference("samples", step)
    if left.steps != right.steps:
        return Difference("steps", min(left.steps, right.steps))
    return None


def read_curve(path: Path) -> list[float]:
    """Return the losses of a run from elsewhere: JSON lines, or a CSV with a `loss` column.

    Args:
        path: metrics.jsonl of a run, a CSV file, or text with one loss per line.

    Raises:
        ConfigError: if it cannot be read or holds no losses.
    """

    def wrong(message: str) -> ConfigError:
        return ConfigError(str(path), [Mistake("", message)])

    try:
        if path.suffix in (".jsonl", ".json"):
            rows = list(read_json_lines(path))
            curve = [float(row["loss"]) for row in _all_rows(rows) if "loss" in row]
        else:
            curve = _read_csv(read_text(path))
    except TextError as error:
        raise wrong(str(error)) from None
    except (ArithmeticError, ValueError, TypeError, IndexError, csv.Error) as error:
        raise wrong(f"is not a loss curve: {short(str(error))}") from None
    if not curve:
        raise wrong("holds no losses: give a CSV with a 'loss' column, or JSON lines with 'loss'")
    return curve


def _all_rows(rows: Sequence[dict[str, Any] | None]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows, 1):
        if row is None:
            raise ValueError(f"row {number} is no JSON object")
        yield row


def _read_csv(text: str) -> list[float]:
    rows = [row for row in csv.reader(text.splitlines()) if row]
    header = [name.strip().lower() for name in rows[0]] if rows else []
    if "loss" in header:
        return [float(row[header.index("loss")]) for row in rows[1:]]
    return [float(row[-1]) for row in rows]
