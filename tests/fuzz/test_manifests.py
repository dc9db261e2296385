"""Any run directory that was damaged, or made by a stranger, is readable or a typed error."""

from __future__ import annotations

import copy
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from samestep.checkpoint.files import sha256_of
from samestep.checkpoint.format import read_model, read_tensors, read_training
from samestep.checkpoint.listing import list_checkpoints, newest_valid, select_checkpoint
from samestep.checkpoint.manifest import MANIFEST, MODEL, TRAINING, Best, _digest
from samestep.checkpoint.resume import find_resume_point, refuse_another_run, warn_of_other_bits
from samestep.checkpoint.torch_file import write_torch_file
from samestep.cli.show import _as_json, checkpoint_marks, checkpoint_row
from samestep.config import load_config
from samestep.errors import CheckpointError, UserError
from samestep.run.run_dir import RunDir, config_of
from samestep.run.time_report import read_times
from samestep.train.record import RunRecord
from samestep.train.trace import read_trace
from samestep.verify.differences import read_curve
from tests.fuzz.property import cases, check_message, soon
from tests.fuzz.texts import nested
from tests.unit.checkpoint.checkpoints import manifest, put

CONFIG = load_config({"global_batch": 8, "epochs": 1})
PLAN = {"global_batch": 8, "lanes": 8, "device": "cpu", "threads_per_rank": 1}
DEEP = "[" * 100_000 + "]" * 100_000
NAMES = ("step-²", "step-٣", "step-", "step--1", "step-1_0", "step-1e3", "step-" + "9" * 200, "step- 5")

strange: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, True, False, 0, -1, 1, 10**30, 10**200, 1e300, -1.5, float("nan"), float("inf"),
                     "", "x", "²", "a\x00b", "\ud800", "../../x", "/etc/passwd", "x" * 1000, [], {}, [[]], {"a": {}}, [1, "x"]]),
    nested,
)  # fmt: skip

texts = st.one_of(
    st.sampled_from(["", "{", "[]", "null", "1", "NaN", '"x"', "{}", DEEP, '{"step": ' * 100_000, "9" * 5000, "\x00", "\xff",
                     '{"step": 1e999}', '{"step": "²"}', '{"step": 1, "loss": "x"}', '{"samples_per_second": "x", "step": []}',
                     '{"samples_per_second": 1, "time_data": {}, "slowest_rank": []}', '["a", 1, null]', '{"loss": null}\n{']),
    strange.map(json.dumps),
    st.text(max_size=30),
)  # fmt: skip


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a nested document."""
    inside = document.items() if isinstance(document, dict) else ()
    inside = enumerate(document) if isinstance(document, list) else inside
    return [path, *(place for key, value in inside for place in places(value, (*path, key)))]


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    document = copy.deepcopy(document)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return document


def sealed(document: Any) -> str:
    """The text of a manifest with the right checksum: that keeps damage out, and no author."""
    if isinstance(document, dict):
        document = {key: value for key, value in document.items() if key != "sha256"}
        document = {"sha256": _digest(document), **document}
    return json.dumps(document)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with two checkpoints, and the other files that a run leaves."""
    run = tmp_path_factory.mktemp("made") / "run"
    state = {"model": {}, "shared": {}, "modules": [], "optimizers": [], "schedules": [], "kept": {}, "position": {"step": 4}}  # fmt: skip
    for step in (2, 4):
        saved = manifest(step, best=Best(2, "val_loss", 0.5), measured=step)
        saved = type(saved)(**{**vars(saved), "config": CONFIG.model_dump(mode="json"), "plan": PLAN})
        put(run / "checkpoints", training=state, saved=saved)
    (run / "config.json").write_text(CONFIG.model_dump_json())
    (run / "started.json").write_text('["launch"]')
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "samples_per_second": 2.0}\n')
    (run / "record.json").write_text("{}")
    (run / "rank-0.jsonl").write_text("{}\n")
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-00000004"


def use(run: Path) -> None:
    """What commands and a resuming run do with a directory; only a typed error comes out."""
    point = None
    for step in readers(run):
        try:
            with soon():
                found = step()
                point = found if step.__name__ == "resume" else point
        except UserError as error:
            check_message(error)
    if point is not None:
        for check in (
            lambda: refuse_another_run(CONFIG, PLAN, point),
            lambda: warn_of_other_bits(PLAN, point, str.encode),
        ):
            try:
                check()
            except CheckpointError:
                continue


def readers(run: Path) -> list[Callable[[], Any]]:
    checkpoints = run / "checkpoints"

    def resume() -> Any:
        return find_resume_point(CONFIG, run, False, lambda line: None)

    def resume_from_it() -> Any:
        other = load_config(CONFIG.model_dump(mode="json"), [f"resume={json.dumps(str(run))}"])
        return find_resume_point(other, run.parent / "other", False, lambda line: None)

    def show() -> None:
        found = list_checkpoints(checkpoints, checksums=True)
        marks = checkpoint_marks(found)
        for item in found:
            checkpoint_row(item, marks, True)
            json.dumps(_as_json(item, marks))

    def lock() -> None:
        folder = RunDir(run)
        try:
            assert all(isinstance(name, str) for name in folder.started_by())
            folder.forget_after(3)
        finally:
            folder.close()

    def rewrite() -> None:
        write_torch_file(run, "best", run.parent / "out.pt")

    return [
        resume, resume_from_it, show, lock, rewrite,
        lambda: newest_valid(checkpoints, lambda line: None),
        lambda: select_checkpoint(run, "best"),
        lambda: read_model(newest(run)),
        lambda: read_training(newest(run)),
        lambda: config_of(run),
        lambda: read_times(run),
        lambda: read_curve(run / "metrics.jsonl"),
        lambda: RunRecord.read(run),
        lambda: read_trace(run),
    ]  # fmt: skip


@cases(40)
@given(st.data(), strange)
def test_any_value_in_a_manifest_is_read_or_refused(run: Path, data: Any, value: Any) -> None:
    path = newest(run) / MANIFEST
    original = path.read_text()
    document = json.loads(original)
    where = data.draw(st.sampled_from(places(document)))
    path.write_text(sealed(changed(document, where, value)))
    try:
        use(run)
    finally:
        path.write_text(original)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("step",), "4"), (("step",), -1), (("step",), True), (("epoch",), None), (("saved_at",), 1e300), (("saved_at",), "now"),
        (("saved_at",), float("nan")), (("metrics",), []), (("best",), 1), (("best",), {"step": "²"}), (("best", "metric"), 1),
        (("config",), 1), (("plan",), None), (("plan", "threads_per_rank"), "two"), (("versions", "torch"), 2),
        (("files",), [1]), (("files", MODEL), 1), (("files", MODEL), ["x", "y"]), (("files", MODEL), ["x", True]),
        (("files", "../../x"), ["x", 1]), (("files", "a\x00b"), ["x", 1]), (("measured",), 1.5), (("world",), 10**200), ((), []),
    ],
)  # fmt: skip
def test_a_manifest_with_other_types_is_refused(run: Path, where: Any, value: Any) -> None:
    path = newest(run) / MANIFEST
    path.write_text(sealed(changed(json.loads(path.read_text()), where, value)))
    [sound, wrong] = list_checkpoints(run / "checkpoints", checksums=True)
    assert not sound.wrong
    assert "is damaged" in wrong.wrong
    use(run)


@cases(25)
@given(
    st.sampled_from(["manifest", "config.json", "started.json", "metrics.jsonl", "record.json", "rank-0.jsonl", "run.lock"]),
    texts,
    st.lists(st.sampled_from(NAMES), max_size=2),
)  # fmt: skip
@example("manifest", DEEP, ["step-²"])
@example("manifest", "\ud800", [])
@example("started.json", DEEP, [])
@example("metrics.jsonl", DEEP, ["step-٣"])
@example("metrics.jsonl", '{"samples_per_second": "x", "step": []}', [])
@example("record.json", DEEP, [])
@example("rank-0.jsonl", '{"step": "x"}', [])
@example("config.json", DEEP, [])
def test_any_text_in_any_file_of_a_run_is_read_or_refused(run: Path, name: str, text: str, folders: list[str]) -> None:
    path = newest(run) / MANIFEST if name == "manifest" else run / name
    original = path.read_bytes() if path.exists() else None
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for folder in folders:
        (run / "checkpoints" / folder).mkdir(exist_ok=True)
    try:
        use(run)
        assert [found.step for found in list_checkpoints(run / "checkpoints", checksums=False)] == [2, 4]
    finally:
        path.unlink(missing_ok=True)
        if original is not None:
            path.write_bytes(original)


@cases(25)
@given(st.data(), strange, st.binary(max_size=64))
def test_any_header_of_the_weights_is_read_or_refused(run: Path, data: Any, value: Any, body: bytes) -> None:
    path = newest(run) / MODEL
    original = path.read_bytes()
    length = struct.unpack("<Q", original[:8])[0]
    header = json.loads(original[8 : 8 + length])
    where = data.draw(st.sampled_from(places(header)))
    text = json.dumps(changed(header, where, value)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + (body or original[8 + length :]))
    try:
        with soon():
            read_tensors(path)
    except CheckpointError as error:
        check_message(error)
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize(
    "state",
    [1, [], torch.ones(2), {}, {"optimizers": 1}, {"model": [], "shared": {}},
     {"model": {}, "shared": {"a": "b"}, "modules": [], "optimizers": [], "schedules": [], "kept": {}}],
    ids=repr,
)  # fmt: skip
def test_a_state_of_another_kind_is_refused(run: Path, state: Any) -> None:
    torch.save(state, newest(run) / TRAINING)
    document = json.loads((newest(run) / MANIFEST).read_text())
    path = newest(run) / TRAINING
    entry = [sha256_of(path), path.stat().st_size]
    (newest(run) / MANIFEST).write_text(sealed(changed(document, ("files", TRAINING), entry)))
    with pytest.raises(CheckpointError):
        write_torch_file(run, "last", run.parent / "out.pt")


def test_a_pipe_in_place_of_a_file_is_refused(run: Path) -> None:
    import os

    path = newest(run) / TRAINING
    path.unlink()
    os.mkfifo(path)
    document = json.loads((newest(run) / MANIFEST).read_text())
    (newest(run) / MANIFEST).write_text(sealed(changed(document, ("files", TRAINING), ["x", 0])))
    with soon():
        found = list_checkpoints(run / "checkpoints", checksums=True)
    assert found[1].wrong == "training.pt is no plain file"
