"""A config out of several files: what wins, where each value is from, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.config import load_config, override_config, read_config
from samestep.errors import ConfigError
from samestep.launch.commands.summary import plan_rows
from tests.unit.config.configs import GOOD

COMMON = """\
task: ../task.py:Task
seed: 3
batch_size: 8
params: {width: 1, head: {depth: 2, kind: a}}
schedule: {name: cosine, warmup: 5}
ema: {decay: 0.9}
trackers: {classes: [{name: own.py:Own}, {name: module:Class}]}
"""
TRAIN = """\
include: parts/common.yaml
platforms: {kaggle: env/kaggle.yaml, colab: env/colab.yaml}
epochs: 3
batch_per_rank: null
global_batch: 16
params: {head: {depth: 4}}
schedule: null
ema: {}
"""


@pytest.fixture(autouse=True)
def _at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG", "COLAB_GPU"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config of three layers."""
    files = {
        "parts/common.yaml": COMMON,
        "train.yaml": TRAIN,
        "env/kaggle.yaml": "distributed: {world_size: 2, backend: nccl}\nglobal_batch: 32\n",
        "env/colab.yaml": "distributed: {world_size: 1}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def wrong(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return [str(mistake) for mistake in caught.value.mistakes]


def test_the_later_file_wins_and_each_value_says_where_it_is_from(folder: Path) -> None:
    loaded = read_config(folder / "train.yaml", ["seed=7"])
    config, origins = loaded.config, loaded.origins
    assert (config.seed, origins["seed"]) == (7, "override")
    assert (config.epochs, origins["epochs"]) == (3, "train.yaml line 3")
    assert config.batch_per_rank is None  # by its other name
    assert config.schedule is None  # a value in a section's place is no section
    assert config.ema is not None
    assert (config.ema.decay, origins["ema.decay"]) == (0.9, "parts/common.yaml line 6")
    assert config.params == {"width": 1, "head": {"depth": 4, "kind": "a"}}
    assert origins["params"] == "parts/common.yaml line 4; head.depth from train.yaml line 6"
    assert config.name == "train"


def test_paths_are_relative_to_the_file_that_sets_them(folder: Path) -> None:
    config = load_config(folder / "train.yaml")
    assert config.folder == folder
    assert config.task == "parts/../task.py:Task"
    assert [entry.name for entry in config.trackers.classes] == ["parts/own.py:Own", "module:Class"]
    # The same from another folder, which includes the whole again.
    (folder / "hpo").mkdir()
    (folder / "hpo" / "smoke.yaml").write_text("include: [../train.yaml]\nepochs: 1\n")
    smoke = load_config(folder / "hpo" / "smoke.yaml")
    assert (smoke.folder / str(smoke.task)).resolve() == folder / "task.py:Task"
    assert smoke.epochs == 1


@pytest.mark.requirement("001-D-1", "001-S5-2", "001-N-2", "001-T-5")
def test_the_platform_adds_its_file_and_the_plan_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = load_config(folder / "train.yaml")
    assert here.distributed.world_size == "auto"
    [note] = here.platform_notes
    assert note == "Platform local (no Kaggle or Colab variable is set): no file is named for it"
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    there = read_config(folder / "train.yaml", ["distributed.backend=gloo"])
    assert there.config.distributed.world_size == 2
    assert there.config.distributed.backend == "gloo"  # the command line is last
    assert there.origins["distributed.world_size"] == "env/kaggle.yaml line 1"
    told = (
        "kaggle (KAGGLE_KERNEL_RUN_TYPE is set): env/kaggle.yaml sets distributed.world_size, "
        "distributed.backend, global_batch"
    )
    assert there.config.platform_notes == (f"Platform {told}",)
    assert ("platform", told) in plan_rows(there.config, 2, 1, None)
    assert override_config(there.config, ["epochs=9"]).platform_notes == (f"Platform {told}",)


def test_what_a_merged_config_records_is_whole(folder: Path) -> None:
    document = load_config(folder / "train.yaml").model_dump(mode="json")
    assert not {"include", "platforms"} & set(document)
    assert load_config(document).model_dump(mode="json") == document


def test_all_mistakes_of_all_files_are_reported_at_once(folder: Path) -> None:
    (folder / "train.yaml").write_text(
        "include: [missing.yaml, parts/common.yaml, parts/list.yaml]\n"
        "platforms: {kagle: a.yaml, colab: env/gone.yaml, kaggle: 3}\nepochs: x\nglobal_batch: 8\n"
    )
    (folder / "parts/list.yaml").write_text("- 1\n")
    (folder / "parts/common.yaml").write_text("batch_per_rank: null\nsed: 1\nseed: 1\nseed: 2\n")
    found = wrong(folder / "train.yaml")
    assert [line for line in found if line.startswith(("include", "platforms"))] == [
        "include (train.yaml line 1): missing.yaml cannot be read: No such file or directory",
        "include (train.yaml line 1): parts/list.yaml holds no keys: a config is a mapping such as 'global_batch: 256'",
        "platforms.kagle (train.yaml line 2): is not a platform: did you mean kaggle?",
        "platforms.colab (train.yaml line 2): env/gone.yaml is not there",
        "platforms.kaggle (train.yaml line 2): you set 3, but it takes a file",
    ]
    rest = "\n".join(found)
    assert "seed (parts/common.yaml line 4): is already set on line 3" in rest
    assert "sed (parts/common.yaml line 2): is not a key of this config" in rest
    assert "epochs (train.yaml line 3): you set 'x'" in rest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("include: 3\n", "you set 3, but it takes a file or a list of files"),
        ("include: [a.yaml, 1]\n", "you set ['a.yaml', 1], but it takes"),
        ("include: ''\n", "it takes a file or a list of files"),
        ('include: "a\\0.yaml"\n', "null character"),
        ("platforms: env/kaggle.yaml\n", "but it takes files, such as {kaggle: env/kaggle.yaml}"),
        ("include: .\n", "cannot be read: Is a directory"),
    ],
)
def test_names_that_are_no_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(f"{text}epochs: 1\nglobal_batch: 8\n")
    [found] = wrong(tmp_path / "config.yaml")
    assert message in found


def test_files_that_lead_back_to_themselves(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("include: b.yaml\nepochs: 1\nglobal_batch: 8\n")
    (tmp_path / "b.yaml").write_text("include: link.yaml\n")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "a.yaml")
    [found] = wrong(tmp_path / "a.yaml")
    assert found == ("include (b.yaml line 1): link.yaml includes itself: a.yaml -> b.yaml -> link.yaml")


def test_files_that_include_each_other_twice_are_not_read_for_ever(tmp_path: Path) -> None:
    for at in range(30):
        (tmp_path / f"{at}.yaml").write_text(f"include: [{at + 1}.yaml, {at + 1}.yaml]\n")
    (tmp_path / "30.yaml").write_text("epochs: 1\nglobal_batch: 8\n")
    assert any("at most 50" in line for line in wrong(tmp_path / "0.yaml"))


def test_layers_are_for_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="include: names files that a file is composed of"):
        load_config({**GOOD, "include": "a.yaml"})
    (tmp_path / "config.yaml").write_text("epochs: 1\nglobal_batch: 8\n")
    [found] = wrong(tmp_path / "config.yaml", "platforms.kaggle=a.yaml")
    assert "names files that a file is composed of" in found
