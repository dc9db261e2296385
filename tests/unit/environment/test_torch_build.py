from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samestep.environment import hardware as module
from samestep.environment.hardware import hardware_without_torch
from samestep.environment.torch_build import TorchBuild, installed_torch

WITH_CUDA = TorchBuild("2.6.0", "12.4", None)


def test_the_installed_torch_is_what_its_files_say() -> None:
    found = installed_torch()
    assert found is not None
    assert (found.version, found.cuda) == (torch.__version__, torch.version.cuda)
    assert found.hip == torch.version.hip


@pytest.mark.parametrize("text", ["this is no Python", "__version__ = None", "cuda = '12.4'"])
def test_files_that_say_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(text)
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "torch")]})
    monkeypatch.setattr("samestep.environment.torch_build.find_spec", lambda name: spec)
    assert installed_torch() is None
    assert hardware_without_torch({}) is None, "torch itself is asked"


def test_a_machine_without_gpus_is_known_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "installed_torch", lambda: WITH_CUDA)
    monkeypatch.setattr(module, "expects_gpu", lambda environ: False)
    found = hardware_without_torch({"CUDA_VISIBLE_DEVICES": ""})
    assert found is not None
    assert (found.device_count, found.cuda.value) == (0, False)
    assert found.cuda.reason == "CUDA_VISIBLE_DEVICES hides every GPU"
    assert found.backends == ("nccl", "gloo")
    monkeypatch.setattr(module, "expects_gpu", lambda environ: True)
    assert hardware_without_torch({}) is None
