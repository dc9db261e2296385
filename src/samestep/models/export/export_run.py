"""Writes a run's model to a file that other programs load, loads it again and compares.

A new format is a module like torchscript.py and a row of `FORMATS`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep.checkpoint.files import Files, refuse_existing, sha256_of
from samestep.errors import ExportDiffers, ExportError, TaskError
from samestep.lanes.random_streams import INIT, derive, reseed
from samestep.models.export import graph, torchscript, weights
from samestep.models.export.check import Agreement, check
from samestep.models.export.examples import FORWARD, read_examples
from samestep.models.export.subject import Built, Runner, Subject, live_outputs, methods_to_keep
from samestep.models.trained_model import Trained, load_trained
from samestep.run.saver import versions


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


@dataclass(frozen=True)
class Exported:
    """A file that was written, and the content of the JSON file beside it."""

    path: Path
    notes: tuple[str, ...]
    facts: dict[str, Any]


def export_run(
    run: Path,
    to: str,
    *,
    which: str = "best",
    of: str = "raw",
    output: Path | None = None,
    methods: Sequence[str] = (),
    device: str = "cpu",
    overrides: Sequence[str] = (),
    force: bool = False,
    trust: bool = False,
) -> Exported:
    """Export a run's model; the file is written only if its outputs match the model's.

    Args:
        run: the run's directory.
        to: the format: torchscript, pt2, onnx or safetensors.
        which: the checkpoint: best, last or the number of a step.
        of: the weights: raw, ema, swa or average.
        output: the file; by default in `<run>/export`, named after the run.
        methods: methods besides forward that a torchscript file must have.
        device: where the exported model is placed.
        overrides: `section.key=value` texts for the run's config.
        force: whether a file that is already at `output` is replaced.
        trust: whether the task's code may run although it is not known to be this user's.

    Raises:
        NotTrusted: if the run's directory names code that this user has not started the run with.
        OutputError: if `output` exists.
        ExportError: if the model cannot be written in this format.
        ExportDiffers: if the file's outputs differ from the model's.

    Example:
        >>> export_run(Path("runs/digits"), "onnx", of="ema").path
        PosixPath('runs/digits/export/digits-ema.onnx')
    """
    form = _format(to, methods)
    if output is not None and not force:
        refuse_existing(output, _beside(output))
    trained = load_trained(run, which, of, _device(device), overrides, trust=trust)
    subject = _subject(trained, methods, keep=to == "torchscript", device=_device(device))
    path = output or run / "export" / (_name(trained, which) + form.suffix)
    built = form.build(subject)
    metadata = {**_metadata(trained, subject), "format": to, "how": built.how}
    with _staged(path) as staged:
        _save(built, staged, path, metadata)
        agreement = _check(form, staged, path, subject, built)
        facts = {**metadata, **_facts(staged, subject, agreement)}
        _beside(staged).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    return Exported(path, built.notes, facts)


def _format(to: str, methods: Sequence[str]) -> Format:
    if to not in FORMATS:
        raise ExportError(f"--to is {to!r}: it takes {', '.join([*FORMATS, 'pt'])}")
    if methods and to != "torchscript":
        raise ExportError(f"--methods is {','.join(methods)}, and {to} keeps no methods: use --to torchscript")
    return FORMATS[to]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ExportError(f"--device is {name!r}, which cannot be used here: {error}") from None
    return device


def _name(trained: Trained, which: str) -> str:
    """Return a name for each choice of checkpoint and weights, always the same for the same choice."""
    chosen = [] if which == "best" else ["last" if which == "last" else f"step{which}"]
    averaged = [] if trained.weights == "raw" else [trained.weights]
    return "-".join([trained.config.name, *chosen, *averaged])


def _subject(trained: Trained, requested: Sequence[str], *, keep: bool, device: torch.device) -> Subject:
    def exportable(model: nn.Module) -> nn.Module:
        made: Any = trained.task.export_model(model)
        if not isinstance(made, nn.Module):
            raise TaskError(
                f"{type(trained.task).__name__}.export_model returned a {type(made).__name__}: it "
                "must return a torch.nn.Module"
            )
        return made.to(device).eval()

    def fresh() -> nn.Module:
        # Initialised from another seed: what a file leaves out must not be right by chance.
        reseed(derive(trained.config.seed, INIT, "export"))
        return exportable(trained.task.model())

    model = exportable(trained.model)
    methods = methods_to_keep(model, requested)
    called = (FORWARD, *methods) if keep else (FORWARD,)
    examples = read_examples(trained.task, trained.config, called, device)
    return Subject(
        model=model,
        fresh=fresh,
        methods=methods,
        device=device,
        examples=examples,
        outputs=live_outputs(model, examples),
    )


def _metadata(trained: Trained, subject: Subject) -> dict[str, Any]:
    """Return the metadata inside the file."""
    manifest = trained.manifest
    return {
        "task": Path(trained.config.task or "").name,
        "model": type(subject.model).__name__,
        **subject.signature(FORWARD),
        "methods": {name: subject.signature(name) for name in subject.outputs if name != FORWARD},
        "step": manifest.step,
        "epoch": manifest.epoch,
        "weights": trained.weights,
        "metrics": dict(manifest.metrics),
        "config_sha256": config_hash(manifest.config),
        "trained_with": dict(manifest.versions),
        "versions": versions(),
    }


def config_hash(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a checkpoint's config as JSON with sorted keys and no spaces."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _save(built: Built, staged: Path, path: Path, metadata: dict[str, Any]) -> None:
    try:
        built.save(staged, json.dumps(metadata))
    except (OSError, RuntimeError) as error:  # torch's zip writer turns one into the other
        raise ExportError(f"{path} could not be written: {error}") from error


def _check(form: Format, staged: Path, path: Path, subject: Subject, built: Built) -> Agreement:
    try:
        return check(_load(form, staged, subject), subject)
    except ExportDiffers as error:
        notes = "".join(f"\nNote: {note}" for note in built.notes)
        raise ExportDiffers(f"{path} was not written: {error}{notes}") from error


def _load(form: Format, staged: Path, subject: Subject) -> Runner:
    try:
        return form.load(staged, subject)
    except Exception as error:  # each library has its own errors
        raise ExportDiffers(f"the file cannot be loaded again: {error}") from error


def _facts(staged: Path, subject: Subject, agreement: Agreement) -> dict[str, Any]:
    """Return what is known only once the file is written and compared."""
    compared = {**asdict(agreement), "data": subject.examples.source, "batches": list(subject.examples.sizes)}
    return {"sha256": sha256_of(staged), "bytes": staged.stat().st_size, "compared": compared}


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".json")


@contextmanager
def _staged(path: Path) -> Iterator[Path]:
    """A temporary path with the same name; what is written there is moved to `path` on success."""
    files = Files()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".export-", dir=path.parent))
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror or error}") from None
    try:
        staged = folder / path.name
        yield staged
        # The model last: a program that waits for it then finds its metadata.
        written = sorted(folder.iterdir(), key=lambda file: file == staged)
        for file in written:
            # The safetensors library writes files that only their owner can read.
            shutil.copymode(_beside(staged), file)
            files.sync(file)
        for file in written:
            files.replace(file, path.parent / file.name)
        files.sync(path.parent)
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(folder)
