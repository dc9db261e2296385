"""The formats of an exported model. A new one is a module like torchscript.py and a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from samestep.models.export import graph, torchscript, weights
from samestep.models.export.built import Built
from samestep.models.export.subject import Runner, Subject


@dataclass(frozen=True)
class Format:
    """A kind of file: its suffix, how a model is built for it, and how it is loaded and run."""

    suffix: str
    build: Callable[[Subject], Built]
    load: Callable[[Path, Subject], Runner]


FORMATS = {
    "torchscript": Format(torchscript.SUFFIX, torchscript.build, torchscript.load),
    "pt2": Format(graph.PT2_SUFFIX, graph.build_pt2, graph.load_pt2),
    "onnx": Format(graph.ONNX_SUFFIX, graph.build_onnx, graph.load_onnx),
    "safetensors": Format(weights.SUFFIX, weights.build, weights.load),
}
