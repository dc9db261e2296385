"""A save that is hit at every single call it makes to the disk, in every way a call can go wrong.

Whatever happens, the newest valid checkpoint is the one before or the new one, to the bit.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from samestep.checkpoint.files import Files
from samestep.checkpoint.format import read_model, read_training
from samestep.checkpoint.listing import list_checkpoints, newest_valid
from samestep.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    PARTIAL,
    TRAINING,
    Best,
    Manifest,
    folder_name,
    verify_checkpoint,
)
from samestep.checkpoint.store import CheckpointStore
from samestep.errors import CheckpointError
from tests.unit.checkpoint.checkpoints import manifest as usual
from tests.variations import variations

T = TypeVar("T")

# -- a disk that fails on demand ------------------------------------------------------------------


class Crash(BaseException):
    """The process is gone: nothing after this reaches the disk."""


@dataclass
class Plan:
    """Which call goes wrong, and how."""

    at: int = 0
    kind: str = "nothing"


@dataclass
class FaultyFiles(Files):
    """Counts every call of a save, and makes one of them go wrong."""

    plan: Plan = field(default_factory=Plan)
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Each call, and the file's name."""
    done: list[tuple[str, str]] = field(default_factory=list)
    """The calls that were completed."""
    dead: bool = False

    def call(self, what: str, path: Path, act: Callable[[], T], halfway: Callable[[], object] = lambda: None) -> T:
        if self.dead:
            raise Crash
        self.calls.append((what, path.name))
        kind = self.plan.kind if len(self.calls) == self.plan.at else "nothing"
        if kind.startswith("crash"):
            if kind == "crash after":
                act()
            elif kind == "crash midway":
                halfway()
            self.dead = True
            raise Crash
        if kind in ("ENOSPC", "EIO"):
            halfway()
            number = getattr(errno, kind)
            raise OSError(number, os.strerror(number))
        result = act()
        self.done.append((what, path.name))
        return result

    @property
    def hit(self) -> tuple[str, str]:
        return self.calls[self.plan.at - 1]

    def cuts(self) -> bool:
        """Whether the coming write is to be a short one, which is no error."""
        return self.plan.kind == "short write" and len(self.calls) + 1 == self.plan.at

    def make_folder(self, path: Path) -> None:
        self.call("make_folder", path, lambda: super(FaultyFiles, self).make_folder(path))

    def open_new(self, path: Path) -> IO[bytes]:
        opened: list[FaultyRaw] = []

        def act() -> None:
            opened.append(FaultyRaw(path, self))

        try:
            self.call("open_new", path, act)
        except BaseException:
            for file in opened:
                file.end()
            raise
        return opened[0]

    def sync(self, path: Path) -> None:
        # Not on the disk for real: no power is cut here, and it would take minutes.
        assert path.exists()
        self.call("sync", path, lambda: None)

    def replace(self, source: Path, target: Path) -> None:
        self.call("replace", target, lambda: super(FaultyFiles, self).replace(source, target))

    def copy(self, source: Path, target: Path) -> None:
        def half_a_copy() -> None:
            target.write_bytes(source.read_bytes()[: source.stat().st_size // 2])

        self.call("copy", target, lambda: super(FaultyFiles, self).copy(source, target), half_a_copy)

    def remove(self, path: Path) -> None:
        def half_a_removal() -> None:
            for entry in sorted(path.iterdir())[:2] if path.is_dir() else []:
                entry.unlink()

        self.call("remove", path, lambda: super(FaultyFiles, self).remove(path), half_a_removal)


class FaultyRaw(io.FileIO):
    """The unbuffered file that `open_new` gives, with the same faults."""

    def __init__(self, path: Path, files: FaultyFiles) -> None:
        super().__init__(path, "wb")
        self._path, self._files = path, files

    def write(self, data: Any, /) -> int:
        whole = memoryview(data).cast("B")
        half = whole[: len(whole) // 2]
        given = half if self._files.cuts() and len(half) else whole
        return self._files.call(
            "write", self._path, lambda: super(FaultyRaw, self).write(given), lambda: super(FaultyRaw, self).write(half)
        )

    def close(self) -> None:
        if self.closed:
            return
        self.end()  # a close that fails has closed the file all the same
        self._files.call("close", self._path, lambda: None)

    def end(self) -> None:
        super().close()


class QuickFiles(Files):
    """A plain disk without the wait for it."""

    def sync(self, path: Path) -> None:
        assert path.exists()


# -- a run that was saved before ------------------------------------------------------------------


def weights(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "layer.weight": torch.randn(4, 3, generator=generator),
        "layer.bias": torch.randn(4, generator=generator).bfloat16(),
    }


def training(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step + 1000)
    moment = torch.randn(4, 3, generator=generator)
    return {"optimizers": [{"state": {0: {"exp_avg": moment}}}], "position": {"step": step}}


def manifest(step: int, best: int | None = None) -> Manifest:
    found = None if best is None else Best(best, "val_loss", 1.0 / best)
    return usual(step, epoch=step // 2, world=1, metrics={"val_loss": 1.0 / step}, best=found)


def save(folder: Path, step: int, best: int | None, files: Files | None = None) -> None:
    store = CheckpointStore(folder / "checkpoints", keep_last=2, files=files or QuickFiles())
    store.write(weights(step), training(step), manifest(step, best))
    store.wait()


def try_to_save(folder: Path, files: Files, best: int | None) -> BaseException | None:
    """What a save of step 6 ended with."""
    try:
        save(folder, 6, best, files)
    except BaseException as error:
        return error
    return None


@pytest.fixture(scope="module")
def in_memory() -> Iterator[Path]:
    """A folder that is quick to fill and to empty, where the machine has one."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def history(in_memory: Path) -> Path:
    """Steps 2 and 4 are saved; 4 is the best so far."""
    folder = in_memory / "history"
    folder.mkdir()
    save(folder, 2, best=2)
    save(folder, 4, best=4)
    return folder


def again(history: Path, *, untidy: bool = False) -> Path:
    """The run as it was, in a new folder; untidy: with what earlier crashes have left."""
    folder = Path(tempfile.mkdtemp(dir=history.parent))
    shutil.copytree(history, folder, dirs_exist_ok=True)
    checkpoints = folder / "checkpoints"
    (folder / MODEL).unlink()
    os.link(checkpoints / folder_name(4) / MODEL, folder / MODEL)
    if untidy:
        for name in (folder_name(6), folder_name(6) + PARTIAL, folder_name(1) + PARTIAL):
            shutil.copytree(checkpoints / folder_name(4), checkpoints / name)
            (checkpoints / name / TRAINING).write_bytes(b"cut")
        # Of an export that died before its last call: the same file as the checkpoint's.
        os.link(checkpoints / folder_name(4) / MODEL, folder / (MODEL + PARTIAL))
    return folder


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def newest(folder: Path) -> tuple[int, list[str]]:
    """The step of the newest valid checkpoint, whose content is that step's; and the warnings."""
    warnings: list[str] = []
    found = newest_valid(folder / "checkpoints", warnings.append)
    assert found is not None, warnings
    assert found.manifest is not None
    assert found.manifest.step == found.step
    verify_checkpoint(found.folder)
    assert same(read_model(found.folder), weights(found.step))
    state = read_training(found.folder)
    assert state["position"] == {"step": found.step}
    moment = state["optimizers"][0]["state"][0]["exp_avg"]
    assert torch.equal(moment, training(found.step)["optimizers"][0]["state"][0]["exp_avg"])
    return found.step, warnings


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob(f"*{PARTIAL}"))


def faults(history: Path, kind: str, untidy: bool, best: int | None) -> Iterator[FaultyFiles]:
    """One layer for every call that a save makes."""
    counter = FaultyFiles()
    folder = again(history, untidy=untidy)
    save(folder, 6, best, counter)
    shutil.rmtree(folder)
    names = {what for what, _ in counter.calls}
    assert names == {"make_folder", "open_new", "write", "close", "sync", "replace", "remove", "copy"}
    for number, call in enumerate(counter.calls, 1):
        if kind != "short write" or call[0] == "write":
            yield FaultyFiles(Plan(number, kind))


KINDS = ["short write", "ENOSPC", "EIO", "crash before", "crash midway", "crash after"]


@pytest.mark.parametrize(
    ("kind", "untidy"),
    variations(
        [(kind, False) for kind in KINDS] + [(kind, True) for kind in KINDS if kind != "EIO"],
        kept=[("ENOSPC", False), ("crash midway", False), ("crash after", False), ("crash midway", True)],
    ),
    ids=lambda value: value if isinstance(value, str) else ("untidy" if value else "tidy"),
)
def test_a_fault_at_any_call_leaves_a_valid_checkpoint(history: Path, kind: str, untidy: bool) -> None:
    for files in faults(history, kind, untidy, best=6):
        folder = again(history, untidy=untidy)
        error = try_to_save(folder, files, best=6)
        where = f"{kind} at call {files.plan.at}: {files.hit[0]} {files.hit[1]}"

        assert (error is None) == (kind == "short write"), f"{where}: {error!r}"
        renamed = ("replace", folder_name(6)) in files.done or (
            kind == "crash after" and files.hit == ("replace", folder_name(6))
        )
        step, warnings = newest(folder)
        assert step == (6 if renamed else 4), where
        listed = list_checkpoints(folder / "checkpoints", checksums=True)
        assert not [item for item in listed if item.folder.name.endswith(PARTIAL)], where
        if not untidy:
            assert not warnings, where
            assert not [item for item in listed if item.wrong], where
        if (folder / MODEL).exists():
            exported = load_file(folder / MODEL)
            assert same(exported, weights(4)) or same(exported, weights(6)), where

        # The run is started again and gets through.
        save(folder, 6, best=6)
        assert newest(folder)[0] == 6, where
        assert not left_over(folder), where
        left = list_checkpoints(folder / "checkpoints", checksums=True)
        assert [(item.step, item.wrong) for item in left] == [(4, ""), (6, "")], where
        assert same(load_file(folder / MODEL), weights(6)), where
        shutil.rmtree(folder)


@pytest.mark.parametrize("best", [2, 4, None])
@pytest.mark.parametrize("kind", ["crash midway", "crash after"])
def test_a_fault_never_removes_the_best(history: Path, kind: str, best: int | None) -> None:
    for files in faults(history, kind, False, best):
        folder = again(history)
        try_to_save(folder, files, best)
        where = f"{kind} at call {files.plan.at}: {files.hit[0]} {files.hit[1]}"
        assert newest(folder)[0] in (4, 6), where
        if best is not None:
            verify_checkpoint(folder / "checkpoints" / folder_name(best))
        allowed = (best or 6, 4)
        exported = load_file(folder / MODEL)
        assert any(same(exported, weights(step)) for step in allowed), where
        shutil.rmtree(folder)


def test_a_disk_that_accepts_one_byte_at_a_time_gets_all_of_them(history: Path) -> None:
    class Slow(io.FileIO):
        def write(self, data: Any, /) -> int:
            return super().write(memoryview(data).cast("B")[:1])

    class OneByOne(QuickFiles):
        def open_new(self, path: Path) -> IO[bytes]:
            return Slow(path, "wb")

    folder = again(history)
    save(folder, 6, best=6, files=OneByOne())
    assert newest(folder) == (6, [])


# -- what the error reports ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ENOSPC", "EIO"])
def test_a_full_disk_is_explained_wherever_it_is_full(history: Path, kind: str) -> None:
    for files in faults(history, kind, False, 6):
        folder = again(history)
        error = try_to_save(folder, files, best=6)
        target = folder / "checkpoints" / folder_name(6)
        intact = all(not c.wrong for c in list_checkpoints(target.parent, checksums=True))
        written = target.exists() and intact and "cleaned up" in str(error)
        shutil.rmtree(folder)
        expected = [f"checkpoint {target} could not be written", "The checkpoints before it are intact"]
        if written:  # what failed came after it
            expected = [f"the files beside {target} could not be cleaned up", "It is intact"]
        assert isinstance(error, CheckpointError), f"{files.hit}: {error!r}"
        assert all(part in str(error) for part in [*expected, os.strerror(getattr(errno, kind))]), files.hit


class Failing(QuickFiles):
    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error

    def make_folder(self, path: Path) -> None:
        if self.error is not None:
            raise self.error
        super().make_folder(path)


@pytest.mark.parametrize("raised_by", ["wait", "write"])
def test_an_error_behind_the_training_surfaces_once(tmp_path: Path, raised_by: str) -> None:
    files = Failing(OSError(errno.ENOSPC, "No space left on device"))
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2, files=files)
    store.write(weights(2), training(2), manifest(2))  # does not raise: it is only begun
    with pytest.raises(CheckpointError, match=rf"{folder_name(2)} could not be written: No space"):
        store.wait() if raised_by == "wait" else store.write(weights(4), training(4), manifest(4))
    store.wait()
    files.error = None
    store.write(weights(6), training(6), manifest(6))
    store.wait()
    assert [item.step for item in list_checkpoints(tmp_path / "checkpoints", checksums=True)] == [6]


@pytest.mark.parametrize("error", [KeyError("name"), MemoryError(), CheckpointError("a reason")])
def test_an_error_that_is_not_the_disks_is_raised_unchanged(tmp_path: Path, error: BaseException) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2, files=Failing(error))
    store.write(weights(2), training(2), manifest(2))
    with pytest.raises(type(error)) as caught:
        store.wait()
    assert caught.value is error
    store.wait()


def test_the_write_is_behind_the_caller_and_one_at_a_time(tmp_path: Path) -> None:
    may_continue, inside, most = threading.Event(), [0], [0]

    class Slow(QuickFiles):
        def make_folder(self, path: Path) -> None:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            assert may_continue.wait(20)
            super().make_folder(path)
            inside[0] -= 1

    store = CheckpointStore(tmp_path / "checkpoints", keep_last=2, files=Slow())
    store.write(weights(2), training(2), manifest(2))
    assert not list_checkpoints(tmp_path / "checkpoints", checksums=False)  # and we are here, while it is written
    may_continue.set()
    store.write(weights(4), training(4), manifest(4))
    store.wait()
    assert most == [1]
    assert [item.step for item in list_checkpoints(tmp_path / "checkpoints", checksums=True)] == [2, 4]


# -- a cut of the power ---------------------------------------------------------------------------


def test_everything_is_on_the_disk_before_it_gets_its_name(history: Path) -> None:
    folder = again(history)
    files = FaultyFiles()
    save(folder, 6, best=6, files=files)
    named = files.calls.index(("replace", folder_name(6)))
    for name in (MODEL, TRAINING, MANIFEST):
        last_write = max(n for n, call in enumerate(files.calls) if call == ("write", name))
        closed = files.calls.index(("close", name))
        assert last_write < closed < files.calls.index(("sync", name)) < named
    entries = files.calls.index(("sync", folder_name(6) + PARTIAL))
    assert files.calls.index(("close", MANIFEST)) < entries < named
    # The checksums are written once the files they cover are on the disk.
    manifest_opened = files.calls.index(("open_new", MANIFEST))
    assert files.calls.index(("sync", TRAINING)) < manifest_opened


def test_nothing_older_is_removed_before_the_new_one_is_on_the_disk(history: Path) -> None:
    folder = again(history)
    files = FaultyFiles()
    save(folder, 6, best=6, files=files)
    named = files.calls.index(("replace", folder_name(6)))
    safe = files.calls.index(("sync", "checkpoints"))
    doomed = files.calls.index(("replace", folder_name(2) + PARTIAL))
    exported = files.calls.index(("replace", MODEL))
    assert named < safe < min(doomed, exported)


def test_a_disk_without_hard_links_gets_a_copy(history: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    folder = again(history, untidy=True)
    monkeypatch.setattr(os, "link", refuse)
    save(folder, 6, best=6)
    assert not (folder / MODEL).samefile(folder / "checkpoints" / folder_name(6) / MODEL)
    assert same(load_file(folder / MODEL), weights(6))
    assert not left_over(folder)
