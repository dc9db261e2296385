"""The recipe's training in real processes: one run at any number of ranks, measured on the whole set."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.processes import samestep
from tests.recipes.token_classification.small import COMMON, TRAIN


def test_weights_and_metrics_are_the_same_on_1_2_and_4_ranks(data: Path, tmp_path: Path) -> None:
    words = (TRAIN, *COMMON, f"params.data={data}")
    proof = samestep("verify", *words, "--worlds", "1,2,4", "--steps", "3", "--json", cwd=tmp_path)
    assert proof.returncode == 0, proof.stdout + proof.stderr
    assert len({w["state_hash"] for w in json.loads(proof.stdout)["worlds"].values()}) == 1
    measured = []
    for ranks in (1, 2):
        done = samestep(
            "launch", *words, "--nproc", str(ranks), f"run_dir=on-{ranks}", cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / f"on-{ranks}" / "metrics.jsonl").read_text().splitlines()
        measured.append([row for line in lines if "macro_f1" in (row := json.loads(line))])
    assert len(measured[0]) == 2
    one, two = ({name: row[name] for name in row if "f1" in name or "/" in name or name == "val_loss"} for row in (measured[0][-1], measured[1][-1]))  # fmt: skip
    assert one == two
    annotated = sum(
        len(json.loads(line)["annotations"])
        for line in (data / "valid.jsonl").open(encoding="utf-8")
    )
    support = [value for name, value in one.items() if name.endswith("/support")]
    assert len(support) == 8
    assert sum(support) == annotated, "every entity of the whole set is counted once"
