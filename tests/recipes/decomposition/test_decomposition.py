"""The recipe with few steps, by the commands that run it: one decomposition at any number of ranks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.config.loading import load_config
from tests.cli.processes import run, samestep
from tests.recipes.decomposition.small import COMMON, CONFIG, RECIPE
from tests.recipes.importing import fork_commands

pytestmark = pytest.mark.usefixtures("recipe")
EXPERIMENTS = ("tms_5-2", "tms_40-10", "residual_mlp", "language")


@pytest.mark.requirement("004-2.1-1", "004-AO-3", "004-6.2-1", "004-5.2-4", "004-2.2-6", "004-SM-3", "004-4.2-2")
def test_the_recipe_from_targets_to_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test, for all of it is about the same trainings."""
    import run as recipe

    fork_commands(monkeypatch)
    folder = tmp_path / "whole"
    assert recipe.main([str(folder), "--experiments", "tms_5-2,language", "--nproc", "1", *COMMON]) == 0
    results = json.loads((folder / "results.json").read_text())
    assert results["same"]
    assert results["compared"] == {"language-two": [], "language-four": []}
    assert list(results["hashes"]["tms_5-2"]) == ["1", "2", "4"]
    assert {"l0/linear1", "mse/stochastic", "identity_error/linear2"} <= results["figures"]["tms_5-2"].keys()
    assert {"l0/embedding", "kl/rounded", "ce/target"} <= results["figures"]["language"].keys()
    page = (folder / "results.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 2 + 4 + 6
    assert_another_run_would_be_noticed(folder / "runs")


def assert_another_run_would_be_noticed(runs: Path) -> None:
    from compare import differences, main

    log = runs / "language-four" / "metrics.jsonl"
    text = log.read_text()
    loss = json.loads(text.splitlines()[0])["loss"]
    log.write_text(text.replace(str(loss), str(loss + 1e-7), 1))
    (found,) = differences(runs / "language", runs / "language-four")
    assert found.startswith("step 0: loss is")
    assert main([str(runs / "language"), str(runs / "language-two")]) == 0
    assert main([str(runs / "language"), str(runs / "language-four")]) == 1


@pytest.mark.requirement("004-6.3-1", "004-KR-2", "004-BS-1")
def test_a_batch_of_8_on_3_ranks_is_that_of_one(tmp_path: Path) -> None:
    """Lanes are distributed as 3, 3 and 2; no sample is dropped, and masks are drawn by lane."""
    from experiments import experiment_of

    sizes = {"features": 6, "embedded": 12, "neurons": 4, "layers": 1, "probability": 0.3}
    torch.save(experiment_of("residual_mlp", sizes).network().state_dict(), tmp_path / "target.pt")
    words = (*COMMON, "global_batch=8", "lanes=8", "params.target=target.pt", f"params.sizes={json.dumps(sizes)}")
    done = samestep(
        "verify", CONFIG / "residual_mlp" / "single.yaml", "--worlds", "1,3", "--steps", "2", "--json", *words, cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    worlds = json.loads(done.stdout)["worlds"]
    assert len({one["state_hash"] for one in worlds.values()}) == 1


@pytest.mark.requirement("004-5.3-1", "004-5.3-3", "004-VS-1", "004-TS-1", "004-X-1")
@pytest.mark.needs("mpirun")
def test_the_script_compares_mpirun_with_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(RECIPE / "scripts")
    import manual_test_ddp as script

    def forked(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        cold = "its ranks are mpirun's" if command[0] == "mpirun" else ""
        done = run(command, cwd=options["cwd"], cold=cold)
        print(done.stdout)
        return done

    monkeypatch.setattr(script.subprocess, "run", forked)
    words = [str(tmp_path / "test"), "--via", "mpirun", "--steps", "2", *COMMON[2:]]
    assert script.main(words) == 0
    assert "mpirun-2: identical to one" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        script.main(words)
    assert "is not empty: give another folder" in capsys.readouterr().err


@pytest.mark.requirement("004-4.2-1")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_configs_of_ranks_differ_in_nothing_but_the_ranks(name: str) -> None:
    single, *others = (load_config(CONFIG / name / f"{size}.yaml") for size in ("single", "two", "four"))
    assert [one.distributed.world_size for one in (single, *others)] == ["auto", 2, 4]
    plain = single.model_dump(exclude={"name", "distributed"})
    for one in others:
        assert one.model_dump(exclude={"name", "distributed"}) == plain
        assert one.params["losses"] == one.loss_weights
    target = load_config(CONFIG / name / "target.yaml")
    assert single.params["target"] == f"runs/{target.name}/files/target.pt"
    assert single.params["sizes"] == target.params["sizes"]
