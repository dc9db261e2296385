"""A sweep's file: every mistake at once, with its line and what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from samestep.errors import ConfigError, MissingExtraError
from samestep.sweep import loading
from samestep.sweep.loading import load_sweep
from samestep.sweep.schema import seconds_of

BASE = "task: task.py:Mine\nglobal_batch: 64\nepochs: 2\nparams: {dropout: 0.1}\noptimizer: {lr: 0.1}\n"
SWEEP = """
base: config.yaml
space:
  optimizer.lr: {loguniform: [1e-5, 5e-3]}
  global_batch: {choice: [32, 64]}
  params.dropout: {uniform: [0.1, 0.3]}
objective: {metric: macro_f1, mode: max}
trials: 50
timeout: 8h
folds: {k: 5, stratify: by_label, seed: 42, file: folds.json}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(BASE)
    return tmp_path


def mistakes(folder: Path, text: str, *overrides: str) -> dict[str, str]:
    (folder / "sweep.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_sweep(folder / "sweep.yaml", overrides)
    found: dict[str, str] = {}
    for mistake in caught.value.mistakes:
        found[mistake.path] = f"{found.get(mistake.path, '')}{mistake}\n"
    return found


def test_a_sweep_as_people_write_it(folder: Path) -> None:
    (folder / "sweep.yaml").write_text(SWEEP)
    sweep = load_sweep(folder / "sweep.yaml", ["trials=3", "objective.mode=min"]).sweep
    assert (sweep.trials, sweep.objective.mode, sweep.objective.metric) == (3, "min", "macro_f1")
    assert sweep.name == folder.name
    assert sweep.path == Path("sweeps") / folder.name
    assert seconds_of(sweep.timeout) == 8 * 3600
    assert (sweep.domains["optimizer.lr"].low, sweep.domains["optimizer.lr"].is_log) == (1e-5, True)
    narrow = load_sweep(folder / "sweep.yaml", ["space.optimizer.lr={choice: [0.1]}"]).sweep
    assert narrow.domains["optimizer.lr"].choices == (0.1,)


def test_all_mistakes_are_reported_at_once(folder: Path) -> None:
    found = mistakes(
        folder,
        """
base: config.yaml
space:
  optimizer.lrr: {loguniform: [1e-5, 5e-3]}
  optimizer.lr: {loguniform: [5e-3, 1e-5]}
  optimizer.weight_decay: {loguniform: [0, 1]}
  params.a: {uniform: [0]}
  params.b: {normal: [0, 1]}
  params.c: {choice: []}
  params.d: {int: [1, 2.5]}
  params.e: 3
  params.f: {uniform: [0, 1], step: -1}
  global_batch: {choice: [32, 64.5]}
  run_dir: {choice: [a, b]}
objective: {metric: f1, mode: maximum}
sampler: bayes
pruner: median
pruner_args: {startup: 3}
trails: 50
timeout: long
""",
    )
    assert "did you mean optimizer.lr?" in found["space.optimizer.lrr"]
    assert "line 4" in found["space.optimizer.lrr"]
    assert "the wrong way round" in found["space.optimizer.lr"]
    assert "a logarithm needs bounds above 0" in found["space.optimizer.weight_decay"]
    assert "two numbers" in found["space.params.a"]
    assert "has normal, but it takes one of" in found["space.params.b"]
    assert "takes a list of values" in found["space.params.c"]
    assert "two whole numbers" in found["space.params.d"]
    assert "you set 3" in found["space.params.e"]
    assert "above 0" in found["space.params.f"]
    assert "64.5 cannot be used" in found["space.global_batch"]
    assert "what the sweep sets itself" in found["space.run_dir"]
    assert "'min' or 'max'" in found["objective.mode"]
    assert "it takes tpe, random, grid" in found["sampler"]
    assert "median does not take it" in found["pruner_args.startup"]
    assert "did you mean trials?" in found["trails"]
    assert "timeout" in found
    assert len(found) == 16


@pytest.mark.parametrize(
    ("change", "path", "message"),
    [
        ("base: nothing.yaml", "base", "cannot be read"),
        ("sampler: grid", "space.optimizer.lr", "a grid needs single values"),
        ("pruner: hyperband", "pruner", "which folds repeat"),
        ("pruner: patient", "pruner_args.patience", "cannot do without it"),
        ("sampler: nowhere.at:All", "sampler", "cannot be used: No module named 'nowhere'"),
        ("sampler: optuna.samplers:QMCSampler", "sampler", "draw the same again"),
        ("seed: -1", "seed", "greater than or equal to 0"),
        ("space: {}", "space", "is empty"),
    ],
)
def test_one_mistake(folder: Path, change: str, path: str, message: str) -> None:
    key = change.partition(":")[0]
    kept = [line for line in SWEEP.splitlines() if not line.startswith(f"{key}:")]
    if key == "space":
        kept = [line for line in kept if not line.startswith("  ")]
    found = mistakes(folder, "\n".join([*kept, change]))
    assert message in found[path]


def test_what_a_sweep_needs(folder: Path) -> None:
    found = mistakes(folder, "trials: 3\n")
    assert found.keys() == {"base", "space", "objective"}
    assert "holds no keys" in mistakes(folder, "- 3")[""]
    assert "already set on line 1" in mistakes(folder, f"trials: 3{SWEEP}")["trials"]
    assert "not an override" in mistakes(folder, SWEEP, "trials")["trials"]


def test_a_base_that_cannot_be_searched_from(folder: Path) -> None:
    (folder / "config.yaml").write_text("epochs: 2\nevaluation: {every_epochs: null}\n")
    found = mistakes(folder, SWEEP)["base"]
    assert "names no task" in found
    assert "evaluates nothing" in found
    (folder / "config.yaml").write_text("task: task.py:Mine\nglobal_batch: 64\nepochs: 2\nrefit: true\n")
    assert "measures nothing, by refit" in mistakes(folder, SWEEP)["base"]


def test_existing_files_carry_over(folder: Path) -> None:
    text = SWEEP.replace("{loguniform: [1e-5, 5e-3]}", "{type: loguniform, min: 1e-5, max: 5e-3}")
    text = text.replace("{choice: [32, 64]}", "{type: choice, values: [32, 64]}")
    (folder / "sweep.yaml").write_text(text)
    (folder / "plain.yaml").write_text(SWEEP)
    assert load_sweep(folder / "sweep.yaml").sweep.domains == load_sweep(folder / "plain.yaml").sweep.domains
    wrong = SWEEP.replace("{choice: [32, 64]}", "{type: choice, min: 3}")
    assert "is a choice without values" in mistakes(folder, wrong)["space.global_batch"]
    wrong = SWEEP.replace("{choice: [32, 64]}", "{type: gauss}")
    assert "has the type 'gauss'" in mistakes(folder, wrong)["space.global_batch"]


def test_a_sweep_needs_no_torch_itself() -> None:
    """It waits for hours beside its trials."""
    code = (
        "import sys, optuna, samestep.sweep.reading, samestep.sweep.cross_validation, samestep.cli.sweep;"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_missing_optuna_is_named_with_its_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise MissingExtraError("samestep sweep", "sweeps")

    monkeypatch.setattr(loading, "import_optuna", missing)
    (folder / "sweep.yaml").write_text(SWEEP)
    with pytest.raises(MissingExtraError, match="sweeps"):
        load_sweep(folder / "sweep.yaml")


def test_a_sweep_out_of_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "hpo").mkdir()
    (folder / "full.yaml").write_text(SWEEP)
    (folder / "config.yaml").rename(folder / "common.yaml")
    (folder / "config.yaml").write_text("include: common.yaml\nepochs: 3\n")
    (folder / "few.yaml").write_text("parallel: 2\n")
    smoke = folder / "hpo" / "smoke.yaml"
    smoke.write_text(
        "include: ../full.yaml\nplatforms: {kaggle: ../few.yaml}\ntrials: 2\n"
        "space: {params.dropout: {choice: [0.1]}}\nobjective: {mode: min}\nfolds: null\n"
    )
    loaded = load_sweep(smoke, ["seed=4"])
    sweep = loaded.sweep
    assert sweep.base_path.resolve() == folder / "config.yaml"
    assert (loaded.base.epochs, loaded.base.global_batch) == (3, 64)
    assert (sweep.trials, sweep.folds, sweep.seed, sweep.name) == (2, None, 4, "smoke")
    assert (sweep.objective.metric, sweep.objective.mode) == ("macro_f1", "min")
    assert sweep.domains["params.dropout"].choices == (0.1,)
    assert sweep.domains["global_batch"].choices == (32, 64)
    assert "the sweep is composed of ../full.yaml, smoke.yaml" in loaded.notes[0]
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    there = load_sweep(smoke)
    assert there.sweep.parallel == 2
    assert "Platform kaggle (KAGGLE_KERNEL_RUN_TYPE is set): ../few.yaml sets parallel" in there.notes


def test_mistakes_in_layers_name_their_files(folder: Path) -> None:
    (folder / "full.yaml").write_text(SWEEP.replace("trials", "trails"))
    found = mistakes(folder, "include: [full.yaml, gone.yaml]\nparallel: x\n", "include=a.yaml")
    assert "trails (full.yaml line 8): is not a key of a sweep: did you mean trials?" in found["trails"]
    assert "parallel (sweep.yaml line 2): you set 'x'" in found["parallel"]
    assert "gone.yaml cannot be read: No such file" in found["include"]
    assert "include (override): names files that a file is composed of" in found["include"]


SEVERAL = SWEEP.replace("{metric: macro_f1, mode: max}", "[{metric: macro_f1, mode: max}, {metric: val_loss}]")


def test_several_objectives(folder: Path) -> None:
    (folder / "sweep.yaml").write_text(SEVERAL)
    sweep = load_sweep(folder / "sweep.yaml", ["sampler=nsga2"]).sweep
    assert sweep.metrics == ("macro_f1", "val_loss")
    assert sweep.directions == ["maximize", "minimize"]
    assert load_sweep(sweep.model_dump(mode="json"), folder=folder).sweep.metrics == sweep.metrics
    found = mistakes(folder, SEVERAL, "pruner=median", "sampler=cmaes")
    assert "a pruner knows one objective only: set none" in found["pruner"]
    assert "cmaes knows one objective only: use nsga2" in found["sampler"]
    assert "named twice" in mistakes(folder, SEVERAL.replace("val_loss", "macro_f1"))["objective"]
    wrong = SEVERAL.replace("{metric: val_loss}", "{metric: val_loss, value: last}")
    assert "is not a key of a sweep" in mistakes(folder, wrong)["further_objectives.0.value"]
    assert mistakes(folder, SWEEP.replace("{metric: macro_f1, mode: max}", "[]"))["objective"]


def test_one_objective_leaves_the_studies_of_before_as_they_are(folder: Path) -> None:
    (folder / "sweep.yaml").write_text(SWEEP)
    assert "further_objectives" not in load_sweep(folder / "sweep.yaml").sweep.definition()


def test_cmaes_names_what_installs_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sweep.yaml").write_text(SWEEP)
    monkeypatch.setitem(sys.modules, "cmaes", None)
    with pytest.raises(MissingExtraError, match=r"sampler: cmaes needs packages .*sweeps"):
        load_sweep(folder / "sweep.yaml", ["sampler=cmaes"])
