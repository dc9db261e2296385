"""Any file and any overrides are a config, or a `ConfigError`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from samestep.config import load_config, override_config
from samestep.config.loading import read_config
from samestep.errors import ConfigError
from tests.fuzz.property import cases, check_message, soon
from tests.fuzz.texts import BOMB, GOOD, MERGE_BOMB, bent, documents, overrides

DEEP = "[" * 2000 + "]" * 2000


def use(path: Path, changes: list[str]) -> None:
    """Read a config and do with it what commands do."""
    loaded = read_config(path, changes)
    config = loaded.config
    json.loads(config.model_dump_json().encode())
    json.dumps({key: [value, origin] for key, value, origin in loaded.rows()}).encode()
    override_config(config, [])
    f"{config.run_path} {config.lane_count(2)}".encode()


def write(folder: Path, text: str, name: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


# The first twelve gave a traceback each, and the next six did not end.
@cases(200)
@given(documents, overrides, st.sampled_from(["c.yaml", "c.json"]), st.booleans(), st.data())
@example(GOOD + "seed: 0x_\n", ["seed=0x"], "c.yaml", False, None)
@example(GOOD, ["params.a=" + "9" * 5000], "c.yaml", False, None)
@example(GOOD + "params: {at: 2024-02-30}\n", ["name=2001-12-14 21:59:43.10 -99:99"], "c.yaml", False, None)
@example(GOOD + "params: !!timestamp x\n", [], "c.yaml", False, None)
@example(GOOD + "drop_last: !!bool x\n", ["epochs=!!int abc"], "c.yaml", False, None)
@example(GOOD + "seed: !!float ''\n", ["seed=!!float x"], "c.yaml", False, None)
@example(GOOD + 'name: "\\U00110000"\n', ['name="\\UFFFFFFFF"'], "c.yaml", False, None)
@example(GOOD, ["params" + ".a" * 2000 + "=1"], "c.yaml", False, None)
@example(GOOD, [f"params.a={DEEP}", "params.b=&a [*a]"], "c.yaml", False, None)
@example('{"": true}', ["=1"], "c.json", False, None)
@example(GOOD + 'name: "a\\0b"\nparams: {a: "\\ud800"}\n', ["run_dir=\ud800"], "c.yaml", False, None)
@example(GOOD + "params: {a: !!binary '////', b: !!set {c}}\n", [], "c.yaml", False, None)
@example(GOOD + BOMB, [], "c.yaml", False, None)
@example(GOOD + MERGE_BOMB, [], "c.yaml", False, None)
@example(GOOD, ["params={" + BOMB.replace("\n", ", ") + "}"], "c.yaml", False, None)
@example(GOOD, ["loss_weights={" + MERGE_BOMB.replace("\n", ", ") + "}"], "c.yaml", False, None)
@example("epochs: 1\nglobal_batch: 999999999999999999989\n", [], "c.yaml", False, None)
@example("epochs: 1\nglobal_batch: 999999937\n", ["lanes=8"], "c.yaml", False, None)
@example(GOOD + "include: [c.yaml, {a: 1}, '']\n", ["include=c.yaml"], "c.yaml", False, None)
@example(GOOD + f"include: {'a' * 5000}\nplatforms: [1]\n", [], "c.yaml", False, None)
@example(GOOD + 'include: "\\ud800"\nplatforms: {1.5: x, local: "a\\0"}\n', [], "c.yaml", False, None)
def test_any_text_is_a_config_or_a_config_error(
    tmp_path: Path, document: str, changes: list[str], name: str, bend: bool, data: Any
) -> None:
    path = write(tmp_path, bent(document, data) if bend else document, name)
    with soon():
        try:
            use(path, changes)
        except ConfigError as error:
            check_message(error)


def test_a_mapping_that_contains_itself_is_a_config_error() -> None:
    loop: dict[str, Any] = {"global_batch": 8, "epochs": 1, "params": {}}
    loop["params"]["again"] = loop
    with pytest.raises(ConfigError, match="nested more than 100 levels deep"):
        load_config(loop)
