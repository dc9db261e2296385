"""pt2 and ONNX: a model as a graph of operations, for batches of any size."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from samestep.errors import ExportError, MissingExtraError
from samestep.models.export.examples import FORWARD, Inputs
from samestep.models.export.subject import METADATA_FILE, METADATA_KEY, Built, Runner, Subject, axis_name, reason

PT2_SUFFIX, ONNX_SUFFIX = ".pt2", ".onnx"


def build_pt2(subject: Subject) -> Built:
    """Export the model with torch.export."""
    program = _program(subject)

    def save(path: Path, metadata: str) -> None:
        torch.export.save(program, path, extra_files={METADATA_FILE: metadata})

    return Built("exported", _left_out(subject, "pt2"), save)


def load_pt2(path: Path, subject: Subject) -> Runner:
    """Load the program in a file."""
    with _quiet():
        module = torch.export.load(path).module()

    def run(_: str, inputs: Inputs) -> Any:
        return module(*inputs)

    return run


def build_onnx(subject: Subject) -> Built:
    """Export the model to ONNX, through torch.export."""
    _require_onnx()
    program = _program(subject)
    names = [f"{name}_in" if name in _output_names(subject) else name for name in subject.names]
    with _quiet():
        try:
            made = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                input_names=names,
                output_names=_output_names(subject),
                dynamic_shapes=_named_axes(subject, names),
            )
        except Exception as error:
            raise _export_error(subject, "ONNX", error) from error
    assert made is not None, "what dynamo=True returns"

    def save(path: Path, metadata: str) -> None:
        made.model.metadata_props[METADATA_KEY] = metadata
        made.save(path)

    return Built("exported", _left_out(subject, "onnx"), save)


def load_onnx(path: Path, subject: Subject) -> Runner:
    """Load the model in a file with onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [argument.name for argument in session.get_inputs()]

    def run(_: str, inputs: Inputs) -> Any:
        feed = {name: tensor.cpu().numpy() for name, tensor in zip(names, inputs, strict=True)}
        return [torch.as_tensor(result) for result in session.run(None, feed)]

    return run


def _program(subject: Subject) -> torch.export.ExportedProgram:
    shapes = tuple(
        {axis: torch.export.Dim.DYNAMIC for axis in axes} or None for axes in subject.examples.dynamic_axes()
    )
    with _quiet(), torch.no_grad():
        try:
            inputs = subject.examples.inputs[FORWARD][0]
            return torch.export.export(subject.model, inputs, dynamic_shapes=shapes)
        except Exception as error:  # tracers refuse Python in too many ways to list
            raise _export_error(subject, "torch.export", error) from error


def _export_error(subject: Subject, by: str, error: Exception) -> ExportError:
    return ExportError(
        f"{type(subject.model).__name__} cannot be exported by {by}: {reason(error)}. Change the "
        "model, or return another one from the task's export_model(self, model)"
    )


def _left_out(subject: Subject, form: str) -> tuple[str, ...]:
    if not subject.methods:
        return ()
    return (f"{form} holds forward alone: {', '.join(subject.methods)} need torchscript",)


def _output_names(subject: Subject) -> list[str]:
    return list(subject.outputs[FORWARD][0])


def _named_axes(subject: Subject, names: list[str]) -> tuple[dict[int, str] | None, ...]:
    """Return the names of dynamic axes in ONNX: batch, or the argument and the axis."""
    named: list[dict[int, str] | None] = []
    first = subject.examples.inputs[FORWARD][0]
    for name, tensor, axes in zip(names, first, subject.examples.dynamic_axes(), strict=True):
        is_batch = {axis: axis_name(subject.examples, tensor, axis) == "batch" for axis in axes}
        named.append({axis: "batch" if is_batch[axis] else f"{name}_{axis}" for axis in axes} or None)
    return tuple(named)


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise MissingExtraError("export --to onnx", "onnx") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log messages and warnings meant for developers of torch's exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # "torchvision is not installed", graphs of failed attempts
    try:
        with warnings.catch_warnings():
            # torch uses its own deprecated names, and has one name for axes of one length.
            warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)
            warnings.filterwarnings("ignore", r"# The axis name: .* will not be used", UserWarning)
            yield
    finally:
        logging.disable(before)
