"""Takes the picture of the live view for the guide, in light and dark: `python scripts/screenshots.py`; needs chromium.

A run on four ranks is stopped and resumed on two, and the page is taken while it trains.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TARGET = Path(__file__).parents[1] / "docs" / "images"
SAMESTEP = [sys.executable, "-m", "samestep"]
SETTINGS = ["name=resumed", "epochs=60", "params.lr=0.003"]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([*SAMESTEP, "init", "mine"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([*SAMESTEP, "train", "mine/config.yaml", "name=first"], cwd=folder, check=True)
        launch = [*SAMESTEP, "launch", "mine/config.yaml", *SETTINGS, "--nproc"]
        with subprocess.Popen([*launch, "4"], cwd=folder) as first:
            _wait_for_step(folder, 200)
            first.send_signal(signal.SIGTERM)
        with subprocess.Popen([*launch, "2"], cwd=folder) as second:
            _wait_for_step(folder, 900)
            _take(folder)
            second.send_signal(signal.SIGTERM)


def _wait_for_step(folder: Path, step: int) -> None:
    metrics = folder / "runs" / "resumed" / "metrics.jsonl"
    while not metrics.exists() or f'"step": {step},' not in metrics.read_text(encoding="utf-8"):
        time.sleep(0.2)


def _take(folder: Path) -> None:
    ui = subprocess.Popen([*SAMESTEP, "ui"], cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert ui.stdout is not None
        address = re.search(r"http://\S+", ui.stdout.readline())
        assert address is not None
        page = address[0].replace("/?", "/run?path=runs/resumed&")
        for name, scheme in (("ui", "1"), ("ui-dark", "0")):
            subprocess.run(
                [
                    "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                    f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1000,1180", "--timeout=4000",
                    f"--user-data-dir={folder / name}", f"--screenshot={TARGET / name}.png", page,
                ],
                check=True, stderr=subprocess.DEVNULL,
            )  # fmt: skip
    finally:
        ui.send_signal(signal.SIGINT)
        ui.wait()


if __name__ == "__main__":
    main()
