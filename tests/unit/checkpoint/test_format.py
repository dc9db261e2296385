"""One checkpoint on disk: what is written is read back exactly; damage is refused."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from samestep.checkpoint.files import Files, sha256_of
from samestep.checkpoint.format import put_in_place, read_model, read_training, write_files
from samestep.checkpoint.manifest import MANIFEST, MODEL, TRAINING, Best, Manifest, _digest, verify_checkpoint
from samestep.errors import CheckpointError
from tests.unit.checkpoint.checkpoints import DAMAGED, manifest, put, same_bits

TYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip


def of_type(dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bits at all, NaNs with payloads among them."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel() * size
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize(
    "dtype", [*TYPES, pytest.param(torch.uint16), pytest.param(torch.uint32), pytest.param(torch.uint64)], ids=str
)
def test_a_tensor_of_any_type_and_shape_comes_back_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    model = {
        "vector": of_type(dtype, 7),
        "number": of_type(dtype),
        "nothing": of_type(dtype, 0, 3),
        "turned": of_type(dtype, 3, 5).t(),
        "every second": of_type(dtype, 8)[::2],
        "images": of_type(dtype, 2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "also nothing": of_type(dtype, 0),
    }
    assert not model["images"].is_contiguous()
    folder = put(tmp_path, model)
    verify_checkpoint(folder)
    found = read_model(folder)
    assert found.keys() == model.keys()
    for name, tensor in model.items():
        assert same_bits(found[name], tensor), name


def test_types_of_all_widths_are_aligned_in_one_file(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = {f"{n}.{dtype}": of_type(dtype, n) for dtype in TYPES for n in (1, 3)}
    folder = put(tmp_path, model)
    found = safetensors.torch.load_file(folder / MODEL)
    assert all(same_bits(found[name], tensor) for name, tensor in model.items())
    # As the library itself would write it: every tensor starts where its type wants it.
    raw = (folder / MODEL).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    assert size % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, entry in header.items():
        assert entry["data_offsets"][0] % model[name].element_size() == 0, name


def test_a_type_that_safetensors_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"wave is of type torch\.complex128"):
        put(tmp_path, {"wave": torch.zeros(2, dtype=torch.complex128)})


def test_the_weights_are_read_in_two_lines_without_samestep(tmp_path: Path) -> None:
    folder = put(tmp_path)
    lines = (
        "import json, safetensors.torch as s, sys\n"
        "print(json.dumps({k: v.tolist() for k, v in s.load_file(sys.argv[1]).items()}))"
    )
    read = subprocess.run(
        [sys.executable, "-c", f"{lines}\nassert 'samestep' not in sys.modules", folder / MODEL],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert json.loads(read.stdout) == {"weight": [[0, 1, 2], [3, 4, 5]]}


def test_a_manifest_comes_back_as_it_was(tmp_path: Path) -> None:
    saved = manifest(
        metrics={"val_loss": 0.1 + 0.2, "nan": float("inf")},
        best=Best(2, "val_loss", 1 / 3),
        ended="done",
        config={"params": {"größe": [1, 2.5, None, True]}},
    )
    found = verify_checkpoint(put(tmp_path, saved=saved))
    assert set(found.files) == {MODEL, TRAINING}
    assert replace(found, files={}) == saved


def test_metrics_by_number_come_back_too(tmp_path: Path) -> None:
    folder = put(tmp_path, saved=manifest(metrics={"accuracy by class": {9: 0.5, 10: 0.25}}))
    assert verify_checkpoint(folder).metrics == {"accuracy by class": {"9": 0.5, "10": 0.25}}


def test_any_changed_byte_of_the_manifest_is_detected(tmp_path: Path) -> None:
    folder = put(tmp_path, saved=manifest(best=Best(2, "val_loss", 0.5)))
    path = folder / MANIFEST
    saved, text = Manifest.read(folder), path.read_bytes()
    noticed = 0
    for place in range(len(text)):
        for byte in {text[place] ^ 1, ord("0")} - {text[place]}:
            path.write_bytes(text[:place] + bytes([byte]) + text[place + 1 :])
            try:
                assert Manifest.read(folder) == saved, place  # a space may become another
            except CheckpointError:
                noticed += 1
    assert noticed >= len(text)


@pytest.mark.parametrize("length", [0, 1, 40, -1])
def test_a_truncated_manifest_is_detected(tmp_path: Path, length: int) -> None:
    folder = put(tmp_path)
    text = (folder / MANIFEST).read_bytes()
    (folder / MANIFEST).write_bytes(text[:length])
    with pytest.raises(CheckpointError, match=MANIFEST):
        verify_checkpoint(folder)


def rewritten(folder: Path, **changes: Any) -> None:
    """The manifest with other values, and a checksum that is right."""
    document = json.loads((folder / MANIFEST).read_text())
    del document["sha256"]
    document |= changes
    text = json.dumps({"sha256": _digest(document), **document})
    (folder / MANIFEST).write_text(text)


def reseal(folder: Path) -> None:
    """The manifest with right checksums for whatever the files hold now."""
    names = (MODEL, TRAINING)
    rewritten(folder, files={n: [sha256_of(folder / n), (folder / n).stat().st_size] for n in names})


def test_another_format_is_refused_with_its_number(tmp_path: Path) -> None:
    folder = put(tmp_path)
    rewritten(folder, format=2)
    with pytest.raises(CheckpointError, match="it is of format 2, and this samestep reads 1"):
        verify_checkpoint(folder)


def test_a_manifest_with_other_keys_is_refused(tmp_path: Path) -> None:
    folder = put(tmp_path)
    rewritten(folder, colour="red")
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        verify_checkpoint(folder)


@DAMAGED
def test_damage_is_detected_and_named(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    folder = put(tmp_path)
    damage(folder)
    with pytest.raises(CheckpointError, match=words):
        verify_checkpoint(folder)


class Evil:
    """An object that runs a command when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = (call, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def poisons(touched: Path) -> dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]]:
    """How each is written, and how a careless program would read it."""
    command = Evil(os.system, f"touch {touched}")
    code = Evil(exec, f"open({str(touched)!r}, 'w').close()")
    good = {"optimizers": [], "position": {"step": 4}}

    def careless(path: Path) -> object:
        return torch.load(path, weights_only=False)

    def very_careless(path: Path) -> object:
        return pickle.loads(path.read_bytes())

    return {
        "zip": (lambda path: torch.save(command, path), careless),
        "beside good keys": (lambda path: torch.save({**good, "kept": {"x": code}}, path), careless),
        "old format": (lambda path: torch.save(code, path, _use_new_zipfile_serialization=False), careless),
        "plain pickle": (lambda path: path.write_bytes(pickle.dumps(command)), very_careless),
        "text pickle": (lambda path: path.write_bytes(pickle.dumps(code, 0)), very_careless),
    }


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("kind", list(poisons(Path())))
def test_a_file_that_wants_to_run_code_is_refused(tmp_path: Path, kind: str) -> None:
    touched = tmp_path / "touched"
    write_poison, careless = poisons(touched)[kind]
    folder = put(tmp_path)
    write_poison(folder / TRAINING)
    reseal(folder)
    verify_checkpoint(folder)  # every checksum is right
    with pytest.raises(CheckpointError, match="cannot be read without running code from it") as caught:
        read_training(folder)
    assert "weights_only" not in str(caught.value), "no advice to trust it"
    assert kind != "zip" or "system" in str(caught.value)
    assert not touched.exists()
    careless(folder / TRAINING)
    assert touched.exists()  # so there was something to refuse


def test_a_whole_object_instead_of_its_state_is_refused(tmp_path: Path) -> None:
    folder = put(tmp_path)
    torch.save(nn.Linear(1, 1), folder / TRAINING)
    with pytest.raises(CheckpointError, match="cannot be read without running code from it"):
        read_training(folder)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(
    "content",
    [b"garbage", b"\0" * 100, b"PK\x03\x04" + b"x" * 50, pickle.dumps({"a": 1}), b"", b"\x80\x02", b"\x80\x02."],
)
def test_an_invalid_training_file_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = put(tmp_path)
    (folder / TRAINING).write_bytes(content)
    reseal(folder)
    with pytest.raises(CheckpointError, match=r"training\.pt cannot be read"):
        read_training(folder)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 16, pickle.dumps({"a": 1})])
def test_an_invalid_model_file_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = put(tmp_path)
    (folder / MODEL).write_bytes(content)
    reseal(folder)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        read_model(folder)


def test_two_that_write_the_same_step_do_no_harm(tmp_path: Path) -> None:
    """As rank 0 and a survivor may, after a rank was lost."""
    first = put(tmp_path)
    second = tmp_path / "step-00000004.survivor-3"
    write_files(Files(), second, {"weight": torch.ones(2)}, {}, manifest())
    put_in_place(Files(), second, first)
    assert [path.name for path in tmp_path.iterdir()] == [first.name]
    assert verify_checkpoint(first).step == 4
