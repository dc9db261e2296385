"""samestep times: where the time of a run went."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from samestep.cli import app


def test_every_number_has_its_unit(tmp_path: Path) -> None:
    rows = [
        {"step": 9, "samples_per_second": 3000.0, "time_data": 0.0012, "time_compute": 0.25,
         "rank_spread": 1.5, "slowest_rank": 1, "peak_memory_mb": 457.25},
        {"step": 19, "samples_per_second": 1000.0, "time_data": 0.0012, "time_compute": 0.75,
         "rank_spread": 1.5, "slowest_rank": 1, "peak_memory_mb": 457.25},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = CliRunner().invoke(app, ["times", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in shown.output.splitlines()
        if line.startswith("│")
    ]
    assert cells == [
        ["throughput", "2,000", "1,000", "samples/s"],
        ["reading data", "1.2", "1.2", "ms/step"],
        ["computing", "500", "750", "ms/step"],
        ["work of the slowest rank", "1.5", "1.5", "x the fastest's"],
        ["peak memory", "457.2", "457.2", "MiB"],
        ["slowest rank, most often", "rank 1", "", ""],
    ]
    found = json.loads(CliRunner().invoke(app, ["times", str(tmp_path), "--json"]).output)
    assert found["time_compute"] == {"median": 0.5, "worst": 0.75}, "seconds, for scripts"
