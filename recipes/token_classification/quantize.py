"""Quantises an exported ONNX model to int8, and compares both on the validation documents.

samestep export runs/entities --to onnx
python recipes/token_classification/quantize.py runs/entities runs/entities/export/entities.onnx int8.onnx
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tags import IGNORED
from torch import Tensor

from samestep.errors import MissingExtraError, OutputError, SamestepError, TaskError
from samestep.models.trained_model import load_trained

BATCH = 32


def quantize(source: Path, target: Path) -> None:
    """Weights as 8-bit integers; what they are multiplied with is quantised as it comes."""
    if not source.is_file():
        raise TaskError(f"there is no file {source}: samestep export RUN --to onnx writes one")
    if target.exists():
        raise OutputError(f"{target} is there already: give another name")
    try:
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError:
        raise MissingExtraError("quantize.py", "onnx") from None
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # advice to run a step for models with shapes that are not known
    try:
        quantize_dynamic(source, target, weight_type=QuantType.QInt8)
    finally:
        logging.disable(before)


def compare(run: Path, files: Sequence[Path], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the files' sizes and F1, and how many tokens get the same label from all of them.

    Args:
        run: whose task has the data.
        files: ONNX files.
        overrides: values of the run's config that are others here, such as params.data.
    """
    # Of a final training too the validation documents are looked at, though it was trained on them.
    task: Any = load_trained(run, overrides=[*overrides, "refit=false"]).task
    sessions = [_session(file) for file in files]
    metrics = [task.metrics() for _ in files]
    same = tokens = 0
    for batch in _batches(task):
        predicted = [_predicted(session, batch) for session in sessions]
        labels = batch["labels"]
        for numbers, its in zip(predicted, metrics, strict=True):
            for metric in its.values():
                metric.update(numbers, labels)
        kept = labels != IGNORED
        equal = torch.stack([numbers == predicted[0] for numbers in predicted]).all(0)
        same, tokens = same + int(equal[kept].sum()), tokens + int(kept.sum())
    return {
        "files": [
            {
                "file": str(file),
                "bytes": file.stat().st_size,
                "macro_f1": its["macro_f1"].compute(),
                "entity_f1": its["entity_f1"].compute(),
            }
            for file, its in zip(files, metrics, strict=True)
        ],
        "tokens": tokens,
        "agreement": same / tokens,
    }


def _batches(task: Any) -> Iterator[dict[str, Tensor]]:
    data = task.valid_data()
    for start in range(0, len(data), BATCH):
        yield task.collate([data[at] for at in range(start, min(start + BATCH, len(data)))])


def _session(file: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def _predicted(session: Any, batch: dict[str, Tensor]) -> Tensor:
    feed = {name: batch[name].numpy() for name in ("input_ids", "attention_mask")}
    return torch.as_tensor(session.run(None, feed)[0]).argmax(-1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Quantise an ONNX file to int8, and compare.")
    parser.add_argument("run", type=Path, help="the run that it was exported from")
    parser.add_argument("source", type=Path, help="what samestep export wrote")
    parser.add_argument("target", type=Path, help="the file to write")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("overrides", nargs="*", help="section.key=value, such as params.data=...")
    given = parser.parse_intermixed_args()
    try:
        quantize(given.source, given.target)
        found = compare(given.run, [given.source, given.target], given.overrides)
    except SamestepError as error:
        print(f"quantize: {error}", file=sys.stderr)
        return error.exit_code
    if given.json:
        print(json.dumps(found))
        return 0
    for row in found["files"]:
        print(f"{row['file']}: {row['bytes']} bytes, macro F1 {row['macro_f1']:.4f}, entity F1 {row['entity_f1']:.4f}")
    print(f"{found['agreement']:.2%} of {found['tokens']} tokens get the same label from both")
    return 0


if __name__ == "__main__":
    sys.exit(main())
