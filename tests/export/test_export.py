"""Exports of one small run: every format, every choice, and what must not pass."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from samestep.checkpoint.files import Files, sha256_of
from samestep.checkpoint.format import read_model, read_training, write_checkpoint
from samestep.checkpoint.listing import select_checkpoint
from samestep.cli import app
from samestep.errors import CheckpointError, ExportDiffers, ExportError, MissingExtraError, TaskError
from samestep.models.export.export_run import FORMATS, config_hash, export_run
from samestep.models.trained_model import load_trained
from tests.distributed.running import train_rank
from tests.export.tasks import CLASSES, FEATURES

TASKS = Path(__file__).with_name("tasks.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    train_rank(
        {
            "task": f"{TASKS}:Exported", "name": "small", "global_batch": 16, "lanes": 4,
            "epochs": 2, "run_dir": str(folder), "distributed": {"threads_per_rank": 1},
        }
    )  # fmt: skip
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, to write into."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def command(run: Path) -> Callable[..., Result]:
    return lambda *arguments: CliRunner().invoke(app, ["export", str(run), *map(str, arguments)])


def around(name: str, *more: str) -> list[str]:
    """The same run, with another model around the trained one."""
    return [f"params.around={name}", *more]


def a_batch(size: int = 6) -> Tensor:
    return torch.randn(size, FEATURES, generator=torch.Generator().manual_seed(9))


def loaded(path: Path, inside: dict[str, str] | None = None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(path, _extra_files=inside or {})


def expected(run: Path, x: Tensor, which: str = "best", weights: str = "raw") -> Tensor:
    with torch.no_grad():
        found: Tensor = load_trained(run, which, weights).model(x)
    return found


# -- every format ---------------------------------------------------------------------------------


def test_torchscript_runs_without_our_code_and_holds_its_metadata(run: Path) -> None:
    done = export_run(run, "torchscript")
    assert done.path == run / "export" / "small.ts"
    inside = {"samestep.json": ""}
    module = loaded(done.path, inside)
    assert torch.equal(module(a_batch()), expected(run, a_batch()))
    metadata = json.loads(inside["samestep.json"])
    assert (metadata["format"], metadata["how"], metadata["methods"]) == ("torchscript", "scripted", {})
    assert done.facts["compared"]["exact"] is True
    assert done.notes == ()


def test_pt2_takes_batches_of_any_size(run: Path) -> None:
    done = export_run(run, "pt2")
    inside = {"samestep.json": ""}
    module = torch.export.load(done.path, extra_files=inside).module()
    for size in (1, 2, 50):
        assert torch.equal(module(a_batch(size)), expected(run, a_batch(size)))
    assert json.loads(inside["samestep.json"])["step"] == 6


def test_onnx_takes_batches_of_any_size(run: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    done = export_run(run, "onnx")
    session = onnxruntime.InferenceSession(done.path, providers=["CPUExecutionProvider"])
    (argument,), (result,) = session.get_inputs(), session.get_outputs()
    assert (argument.name, argument.shape) == ("x", ["batch", FEATURES])
    assert (result.name, result.shape) == ("output", ["batch", CLASSES])
    for size in (1, 2, 50):
        (found,) = session.run(None, {"x": a_batch(size).numpy()})
        torch.testing.assert_close(torch.tensor(found), expected(run, a_batch(size)))
    metadata = json.loads(session.get_modelmeta().custom_metadata_map["samestep"])
    assert metadata["outputs"] == [{"name": "output", "shape": ["batch", CLASSES], "dtype": "float32"}]
    assert 0 <= done.facts["compared"]["largest_difference"] < 1e-5


def test_safetensors_holds_the_weights(run: Path) -> None:
    done = export_run(run, "safetensors")
    saved = load_file(done.path)
    trained = read_model(select_checkpoint(run, "best").folder)
    assert saved.keys() == trained.keys()
    assert all(torch.equal(saved[name], trained[name]) for name in saved)
    with safe_open(done.path, "pt") as file:
        assert json.loads(file.metadata()["samestep"])["how"] == "weights only"
    # As readable as what is beside it.
    assert done.path.stat().st_mode == (run / "export" / "small.safetensors.json").stat().st_mode


@pytest.mark.parametrize("form", ["torchscript", "pt2", "onnx", "safetensors"])
def test_several_arguments_and_results_keep_their_names(run: Path, form: str) -> None:
    if form == "onnx":
        pytest.importorskip("onnxruntime")
    done = export_run(run, form, overrides=around("Several"))
    assert [(t["name"], t["shape"]) for t in done.facts["inputs"]] == [("left", ["batch", 2]), ("right", ["batch", 3])]
    assert [(t["name"], t["dtype"]) for t in done.facts["outputs"]] == [("logits", "float32"), ("best", "int64")]


def test_shared_tensors_are_under_all_their_names(run: Path) -> None:
    done = export_run(run, "safetensors", overrides=around("Twice"))
    saved = load_file(done.path)
    assert len(saved) == 2 * len(read_model(select_checkpoint(run, "best").folder))
    assert torch.equal(saved["model.last.bias"], saved["again.last.bias"])


def test_a_result_may_lose_its_axis_in_a_batch_of_one(run: Path) -> None:
    done = export_run(run, "torchscript", overrides=around("Squeezing"))
    assert done.facts["outputs"][0]["shape"] == ["batch"]


# -- TorchScript's methods ------------------------------------------------------------------------


def test_marked_methods_are_kept_and_compared(run: Path) -> None:
    done = export_run(run, "torchscript", overrides=around("Differentiated"))
    assert set(done.facts["compared"]["methods"]) == {"forward", "jacobian", "normalise", "scale"}
    assert done.facts["methods"]["jacobian"]["outputs"][0]["shape"] == ["batch", CLASSES, FEATURES]
    module = loaded(done.path)
    x = a_batch()
    whole = torch.autograd.functional.jacobian(module, x)  # [batch, classes, batch, features]
    own = torch.stack([whole[number, :, number] for number in range(len(x))])
    torch.testing.assert_close(module.jacobian(x), own)
    assert module.names == ["a", "b"]
    assert not hasattr(module, "probabilities")


def test_a_requested_method_is_kept_without_a_mark(run: Path, command: Callable[..., Result]) -> None:
    done = command(*around("Differentiated"), "--methods", "probabilities,jacobian", "--json")
    assert done.exit_code == 0, done.output
    module = loaded(json.loads(done.stdout)["path"])
    x = a_batch()
    torch.testing.assert_close(module.probabilities(x), module(x).softmax(1))


def test_other_formats_note_that_they_leave_methods_out(run: Path) -> None:
    done = export_run(run, "pt2", overrides=around("Differentiated"))
    assert "jacobian, normalise" in done.notes[0]
    assert "need torchscript" in done.notes[0]
    assert done.facts["methods"] == {}


def test_what_cannot_be_scripted_is_traced_with_a_note(run: Path, command: Callable[..., Result]) -> None:
    done = command(*around("Unscriptable"))
    assert done.exit_code == 0, done.output
    assert "torchscript, traced" in done.output
    assert "note: it could not be scripted (try blocks aren't supported), so it was traced" in (done.output)
    module = loaded(run / "export" / "small.ts")
    assert torch.equal(module(a_batch()), expected(run, a_batch()))


def test_a_method_that_cannot_be_kept_is_an_error(run: Path) -> None:
    with pytest.raises(ExportError, match=r"neither scripted nor traced with its methods twice"):
        export_run(run, "torchscript", overrides=around("Unkept"))
    assert not (run / "export").exists()


def test_the_deprecation_of_torchscript_is_not_shown(run: Path, recwarn: pytest.WarningsRecorder) -> None:
    export_run(run, "torchscript")
    export_run(run, "torchscript", overrides=around("Unscriptable"))
    assert not [str(warning.message) for warning in recwarn]


# -- which weights --------------------------------------------------------------------------------


def averaged(run: Path) -> dict[str, Tensor]:
    return {
        name: tensor * 0.5
        for name, tensor in read_model(select_checkpoint(run, "last").folder).items()
        if tensor.is_floating_point()
    }


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averages_of_a_checkpoint(run: Path, kind: str) -> None:
    found = select_checkpoint(run, "last")
    assert found.manifest is not None
    training = read_training(found.folder)
    training["kept"][kind] = {"model": averaged(run)}
    write_checkpoint(Files(), found.folder, read_model(found.folder), training, found.manifest)
    done = export_run(run, "torchscript", which="last", of=kind)
    assert done.path.name == f"small-last-{kind}.ts"
    assert done.facts["weights"] == kind
    module = loaded(done.path)
    assert torch.equal(module.first.weight, averaged(run)["first.weight"])
    assert not torch.equal(module(a_batch()), expected(run, a_batch(), "last"))


def test_the_average_of_several_checkpoints(run: Path) -> None:
    save_file(averaged(run), run / "average.safetensors")
    done = export_run(run, "safetensors", of="average")
    assert torch.equal(load_file(done.path)["last.bias"], averaged(run)["last.bias"])


def test_any_checkpoint_by_its_step(run: Path) -> None:
    done = export_run(run, "safetensors", which="3")
    assert (done.path.name, done.facts["step"]) == ("small-step3.safetensors", 3)
    first, last = load_file(done.path), read_model(select_checkpoint(run, "last").folder)
    assert not torch.equal(first["last.bias"], last["last.bias"])


# -- which data -----------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["none", "stream"])
def test_without_a_validation_set_it_is_compared_on_training_data(run: Path, data: str) -> None:
    done = export_run(run, "torchscript", overrides=[f"params.data={data}"])
    assert done.facts["compared"]["data"] == "training"
    assert done.facts["compared"]["batches"] == [4, 3, 1]


# -- the metadata ---------------------------------------------------------------------------------


def test_the_metadata_are_written_beside_the_file(run: Path, command: Callable[..., Result]) -> None:
    done = command("--output", run / "elsewhere" / "model.ts", "--json")
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    path = Path(printed.pop("path"))
    assert printed.pop("notes") == []
    assert path == run / "elsewhere" / "model.ts"
    assert json.loads((path.parent / "model.ts.json").read_text()) == printed
    assert sorted(file.name for file in path.parent.iterdir()) == ["model.ts", "model.ts.json"]
    manifest = select_checkpoint(run, "best").manifest
    assert manifest is not None
    assert printed["inputs"] == [{"name": "x", "shape": ["batch", FEATURES], "dtype": "float32"}]
    assert (printed["task"], printed["model"]) == ("tasks.py:Exported", "Net")
    assert (printed["step"], printed["epoch"]) == (manifest.step, manifest.epoch)
    assert printed["config_sha256"] == config_hash(manifest.config)
    assert printed["versions"]["torch"] == torch.__version__
    assert printed["sha256"] == sha256_of(path)
    assert printed["metrics"] == manifest.metrics


def test_the_configs_hash_depends_on_values_and_not_on_their_order() -> None:
    assert config_hash({"a": 1, "b": [2]}) == config_hash({"b": [2], "a": 1})
    assert config_hash({"a": 1}) != config_hash({"a": 2})


# -- what must not pass ---------------------------------------------------------------------------


def test_a_file_that_differs_is_not_written_and_the_earlier_one_stays(
    run: Path, command: Callable[..., Result]
) -> None:
    assert command().exit_code == 0
    before = sha256_of(run / "export" / "small.ts")
    with pytest.warns(torch.jit.TracerWarning):
        done = command(*around("Branching"))
    assert done.exit_code == 4
    assert "small.ts was not written: forward on a batch of 3, output, at [" in done.stderr
    assert "is allowed between them" in done.stderr
    assert "so it was traced" in done.stderr
    assert sha256_of(run / "export" / "small.ts") == before
    names = sorted(file.name for file in (run / "export").iterdir())
    assert names == ["small.ts", "small.ts.json"]


def test_a_file_for_one_size_of_batch_is_detected(run: Path) -> None:
    with (
        pytest.warns(torch.jit.TracerWarning),
        pytest.raises(ExportDiffers, match=r"(?s)the file fails in forward on a batch of 3: "),
    ):
        export_run(run, "torchscript", overrides=around("OfOneSize"))
    assert not list((run / "export").iterdir())


def test_weights_that_are_not_the_complete_model_are_detected(run: Path) -> None:
    with pytest.raises(ExportDiffers, match="forward on a batch of 4"):
        export_run(run, "safetensors", overrides=around("Forgetful"))


@pytest.mark.parametrize("form", ["pt2", "onnx"])
def test_a_model_that_is_no_graph_is_refused(run: Path, form: str) -> None:
    if form == "onnx":
        pytest.importorskip("onnxruntime")
    with pytest.raises(ExportError, match=r"Branching cannot be exported by torch\.export: \w+"):
        export_run(run, form, overrides=around("Branching"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: out * (1 + 1e-3), "forward on a batch of 4, output, at"),
        (lambda out: out * torch.nan, "the file gives nan"),
        (lambda out: out[:, :-1], r"the file gives \[4, 2\] float32 and the model \[4, 3\] float32"),
        (lambda out: out.double(), r"the file gives \[4, 3\] float64"),
        (lambda out: (out, out), "the file gives 2 tensors and the model 1"),
        (lambda out: "text", "the file fails in forward on a batch of 4"),
    ],
)
def test_every_kind_of_difference_is_reported(
    run: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any], message: str
) -> None:
    form = FORMATS["torchscript"]

    def load(path: Path, subject: Any) -> Any:
        honest = form.load(path, subject)
        return lambda method, inputs: change(honest(method, inputs))

    monkeypatch.setitem(FORMATS, "torchscript", replace(form, load=load))
    with pytest.raises(ExportDiffers, match=message):
        export_run(run, "torchscript")


def test_rounding_is_allowed_and_reported(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMATS["torchscript"]

    def load(path: Path, subject: Any) -> Any:
        honest = form.load(path, subject)
        return lambda method, inputs: honest(method, inputs) * (1 + 1e-6)

    monkeypatch.setitem(FORMATS, "torchscript", replace(form, load=load))
    compared = export_run(run, "torchscript").facts["compared"]
    assert compared["exact"] is False
    assert 0 < compared["largest_difference"] < 1e-5


def test_a_file_that_cannot_be_loaded_is_detected(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMATS["pt2"]

    def load(path: Path, subject: Any) -> Any:
        path.write_bytes(path.read_bytes()[:-200])
        return form.load(path, subject)

    monkeypatch.setitem(FORMATS, "pt2", replace(form, load=load))
    with pytest.raises(ExportDiffers, match="cannot be loaded again"):
        export_run(run, "pt2")
    assert not list((run / "export").iterdir())


# -- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "coreml"], "--to is 'coreml': it takes torchscript, pt2, onnx, safetensors"),
        (["--to", "pt2", "--methods", "jacobian"], "pt2 keeps no methods: use --to torchscript"),
        (["--methods", "jacobian"], "--methods names jacobian, which Net does not have: it has none"),
        (
            ["--methods", "jac,normalise", *around("Differentiated")],
            "names jac, which Differentiated does not have: it has jacobian, normalise, probabilities",
        ),
        (["--which", "77"], "--which is '77'"),
        (["--weights", "ema"], "holds no ema weights"),
        (["--weights", "best"], "there are no weights 'best'"),
        (["--device", "tpu9"], "--device is 'tpu9', which cannot be used here"),
        (around("text"), "Exported.export_model returned a str: it must return a torch.nn.Module"),
        (["params.data=names"], "model_inputs returned dict for forward"),
    ],
)
def test_a_mistake_is_reported_without_a_traceback(
    run: Path, command: Callable[..., Result], arguments: list[str], message: str
) -> None:
    done = command(*arguments)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (run / "export").exists()


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a run's directory"):
        export_run(tmp_path, "torchscript")


def test_a_method_that_needs_other_arguments_gets_a_hint_where_to_name_them(run: Path) -> None:
    config = run / "config.json"
    config.write_text(config.read_text().replace("tasks.py:Exported", "tasks.py:Forgotten"))
    with pytest.raises(TaskError, match=r"scale failed on .*override model_inputs\(self, batch"):
        export_run(run, "torchscript", overrides=around("Differentiated"), trust=True)


def test_a_wrong_number_of_arguments_is_reported(run: Path) -> None:
    config = run / "config.json"
    config.write_text(config.read_text().replace("tasks.py:Exported", "tasks.py:Forgotten"))
    with pytest.raises(TaskError, match=r"Several\.forward does not take .* 1 argument.*'right'"):
        export_run(run, "torchscript", overrides=around("Several"), trust=True)


def test_a_path_that_cannot_be_written_is_reported(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ExportError, match=r"model\.ts cannot be written: "):
        export_run(run, "torchscript", output=tmp_path / "file" / "model.ts")


def test_onnx_without_its_packages_names_the_extra(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"\.\[onnx\]"):
        export_run(run, "onnx")
