"""The ports of public scripts: where their sources are, they are made and verified again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.public_scripts.run import Script, edited, scripts, with_equal

SOURCES = os.environ.get("SAMESTEP_PUBLIC_SCRIPTS")


def test_edits_are_made_from_the_end() -> None:
    text = "import torch\nfor x in data:\n    loss.backward()\n"
    edits = [(13, 0, "import samestep\n"), (22, 4, "run.prepare(data)"), (32, 15, "run.backward(loss)")]
    assert edited(text, edits) == (
        "import torch\nimport samestep\nfor x in run.prepare(data):\n    run.backward(loss)\n"
    )


def test_what_must_be_first_stays_first() -> None:
    assert with_equal("import a\n") == "import equal\nimport a\n"
    assert with_equal("# b\nfrom __future__ import c\nimport d\n").splitlines()[2] == "import equal"


def test_all_ten_are_stored_with_their_versions_and_none_of_their_code() -> None:
    found = scripts()
    assert len(found) == 10
    for script in found:
        assert len(script.commit) == 40
        added = [text for edits in script.files.values() for _, _, text in edits["port"]]
        assert any("samestep" in text for text in added)
        assert sum(map(len, added)) < 2500, "only what a port adds"


@pytest.mark.skipif(not SOURCES, reason="SAMESTEP_PUBLIC_SCRIPTS names no folder with clones of the repositories")
@pytest.mark.parametrize("script", scripts(), ids=lambda script: script.name)
def test_a_port_is_one_training_at_any_size(script: Script, tmp_path: Path) -> None:
    _, port = script.build(Path(SOURCES or ""), tmp_path)
    assert script.verify(port, [])["kept"]
    assert script.distance(*script.build(Path(SOURCES or ""), tmp_path / "again")) < 1e-6
