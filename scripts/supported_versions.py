"""Run the unit tests and one `samestep verify` on the oldest or the newest supported versions.

    python scripts/supported_versions.py oldest                      # `make test-oldest`
    python scripts/supported_versions.py newest --python python3.13  # `make test-newest`

`oldest` takes the lowest Python of `requires-python` and the lower bound of every dependency,
`newest` the highest Python among the classifiers and the newest releases that pip finds. Each creates
its own virtual environment, in a temporary directory that is removed afterwards. Not part of
CI: each downloads several gigabytes, since most torch wheels contain CUDA.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import metadata, requires
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ["tests/unit", "tests/test_architecture.py", "tests/test_metadata.py"]


def lower_bounds(requirements: list[str]) -> list[str]:
    """`torch==2.6` for each `torch>=2.6`; optional dependencies are left to pip.

    Raises:
        ValueError: A dependency has no lower bound, so that nobody could test the oldest one.
    """
    pins = []
    for requirement in requirements:
        if "extra ==" in requirement:
            continue
        found = re.fullmatch(r"([\w.-]+) *>= *([\d.]+)(,.*)?", requirement.strip())
        if found is None:
            raise ValueError(f"{requirement} has no lower bound of the form name>=version")
        pins.append(f"{found[1]}=={found[2]}")
    return pins


def interpreter(which: str) -> str:
    """Return the name of the oldest or newest supported Python, such as `python3.10`."""
    about = metadata("samestep")
    if which == "oldest":
        return "python" + about["Requires-Python"].removeprefix(">=")
    listed = re.findall(r"Python :: 3\.(\d+)", "\n".join(about.get_all("Classifier") or []))
    return f"python3.{max(map(int, listed))}"


def check(which: str, python: str, folder: Path) -> None:
    """Install samestep with these versions in a new environment, and run its tests there.

    Args:
        which: `oldest` or `newest`.
        python: The interpreter to make the environment with.
        folder: A directory for the environment and the run of `verify`.
    """
    pins = lower_bounds(requires("samestep") or []) if which == "oldest" else []
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n", encoding="utf-8")
    # The tests must find what is installed there, not what this shell points to.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str, cwd: Path = ROOT) -> None:
        print("+", *command, flush=True)
        subprocess.run(command, cwd=cwd, env=environ, check=True)

    run(python, "-m", "venv", str(folder / "venv"))
    here = str(folder / "venv" / "bin" / "python")
    run(here, "-m", "pip", "install", "--quiet", "--upgrade", "pip")
    run(here, "-m", "pip", "install", "--quiet", "-c", str(constraints), "-e", ".[dev]")
    names = ["samestep", *(re.split(r"[><=!~ ;\[]", r)[0] for r in requires("samestep") or [])]
    run(here, "-c", _SHOW, *dict.fromkeys(names))
    run(here, "-m", "pytest", "-p", "no:cacheprovider", "-n", "auto", *TESTS)
    config = str(ROOT / "recipes" / "digits" / "config.yaml")
    verify = ["verify", config, "--worlds", "1,2,4", "--steps", "8", "--resumed"]
    run(here, "-m", "samestep", *verify, cwd=folder)


_SHOW = """
import platform, sys
from importlib.metadata import PackageNotFoundError, version
print("python", platform.python_version())
for name in sys.argv[1:]:
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name, "is not installed")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("which", choices=["oldest", "newest"])
    parser.add_argument("--python", help="the interpreter, by name or path")
    parser.add_argument("--keep", metavar="DIR", help="use this directory and do not remove it")
    arguments = parser.parse_args()
    name = arguments.python or interpreter(arguments.which)
    python = shutil.which(name)
    if python is None:
        sys.exit(f"{name} is not on the PATH: install it, or give another one with --python")
    try:
        if arguments.keep:
            folder = Path(arguments.keep).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            check(arguments.which, python, folder)
        else:
            with tempfile.TemporaryDirectory(prefix=f"samestep-{arguments.which}-") as made:
                check(arguments.which, python, Path(made))
    except subprocess.CalledProcessError as error:
        sys.exit(f"{arguments.which}: failed with exit code {error.returncode}: {error.cmd}")
    print(f"{arguments.which}: the unit tests and samestep verify pass")


if __name__ == "__main__":
    main()
