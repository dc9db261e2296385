"""Where a sweep's trials are kept: which places are taken, and that no password is shown or kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samestep.config.secrets import without_passwords
from samestep.errors import ConfigError, StorageError
from samestep.sweep.database import cut_torn_end
from samestep.sweep.loading import load_sweep
from samestep.sweep.optuna_parts import draw
from samestep.sweep.reading import reload_sweep, trials_of
from samestep.sweep.storage import Storage, refuse_other_storage
from tests.unit.sweep.studies import begin_study, finish_study, quality

PASSWORD = "hunter2/@:x"


def mistake(storage: Any, folder: Path) -> str:
    """What is wrong with a storage, as a person sees it."""
    with pytest.raises(ConfigError) as error:
        begin_study(folder, storage=storage)
    (found,) = error.value.mistakes
    assert found.path == "storage"
    assert "hunter2" not in str(error.value)
    return found.message


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("sqlte", "you set 'sqlte': it takes sqlite, journal, or a database's URL"),
        ("mysql://h/db?local_infile=1", "sets local_infile, which a storage may not"),
        ("redis://h/1", "redis is not supported: there are postgresql, mysql"),
        ("sqlite:///here.db", "depends on the directory that a command runs in"),
        ("sqlite://", "depends on the directory that a command runs in"),
        ("postgresql+nothing://h/db", "postgresql+nothing is not a driver that SQLAlchemy knows"),
        ("postgresql+pg8000://h/db", "needs the package pg8000, which is not installed: pip"),
        ("postgresql://u:hunter2@h/db", "holds its password, and a sweep's file is stored"),
        (f"postgresql://u:{PASSWORD}@h/db", "you set 'postgresql://u:***@h/db'"),
        ("postgresql://h/db?password=hunter2", "holds password, and a sweep's file"),
        ("postgresql://u:${NOT_SET_AT_ALL}@h/db", "the variable NOT_SET_AT_ALL is not set here"),
        ("postgresql://u:hunter2@h:port/db", "you set 'postgresql://u:***@h:port/db'"),
        (["postgresql://u:hunter2@h/db"], "you set ['postgresql://u:***@h/db']"),
    ],
)
def test_a_storage_that_cannot_be_used_is_a_mistake_of_the_file(storage: Any, message: str, tmp_path: Path) -> None:
    assert message in mistake(storage, tmp_path)


def test_what_cannot_be_read_shows_no_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_sweep({}, ["storage=[postgresql://u:hunter2@h/db", "postgresql://u:hunter2@h/db"])
    assert "hunter2" not in str(error.value)
    assert "postgresql://u:***@h/db: is not an override" in str(error.value)
    path = tmp_path / "sweep.yaml"
    path.write_text("storage: [postgresql://u:hunter2@h/db\n")
    with pytest.raises(ConfigError, match="YAML") as error:
        load_sweep(path)
    assert "hunter2" not in str(error.value)


def test_passwords_are_hidden_and_references_are_not() -> None:
    text = "at mysql://u:a@b/c:d@h/x?y=1&sslpassword=e&z=2, not postgresql://u:${PW}@h/x, file:///a:b"
    assert without_passwords(text) == (
        "at mysql://u:***@h/x?y=1&sslpassword=***&z=2, not postgresql://u:${PW}@h/x, file:///a:b"
    )


@pytest.mark.parametrize("storage", ["sqlite", "journal", "sqlite:///{folder}/elsewhere.db"])
def test_a_study_reads_the_same_from_each_storage(storage: str, tmp_path: Path) -> None:
    loaded = begin_study(tmp_path, storage=storage.format(folder=tmp_path))
    assert trials_of(loaded) == []
    finish_study(loaded)
    found = trials_of(reload_sweep(loaded.sweep.path))
    assert [t.state for t in found] == [
        "complete", "complete", "complete", "pruned", "complete", "failed", *["complete"] * 3, "running",
    ]  # fmt: skip
    assert found[0].values.keys() == loaded.sweep.domains.keys()
    assert found[0].value == 1.0 * found[0].objectives[0]
    drawn = [draw(loaded.sweep, number, {})[0] for number in range(10)]
    assert [t.values for t in found] == drawn, "to the bit"
    assert found[3].value == quality(drawn[3]) / 2, "pruned"
    assert found[5].as_json()["reason"].startswith("RuntimeError: ")
    storage_again = Storage(loaded.sweep, loaded.sweep.path)
    assert [t.value for t in storage_again.trials()] == [t.value for t in found]
    storage_again.close()


def test_another_storage_than_the_study_had_is_refused_with_both(tmp_path: Path) -> None:
    loaded = begin_study(tmp_path, storage="journal")
    finish_study(loaded, 1)
    folder = loaded.sweep.path
    other = load_sweep({**loaded.sweep.model_dump(mode="json"), "storage": "sqlite"}, folder=tmp_path)
    with pytest.raises(StorageError) as error:
        refuse_other_storage(other.sweep, folder)
    assert f"are in journal ({folder / 'study.journal'})" in str(error.value)
    assert f"storage is now sqlite ({folder / 'study.db'})" in str(error.value)
    with pytest.raises(StorageError):
        trials_of(other)


def test_a_variable_is_the_whole_url_and_nothing_keeps_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUDY_URL", f"sqlite://u:hunter2@/{tmp_path}/a.db")
    loaded = begin_study(tmp_path, storage="${STUDY_URL}")
    with pytest.raises(StorageError) as error:  # SQLite knows no users
        Storage(loaded.sweep, loaded.sweep.path)
    assert "hunter2" not in str(error.value)
    monkeypatch.setenv("STUDY_URL", f"sqlite:///{tmp_path}/a.db")
    finish_study(loaded, 2)
    place = json.loads((loaded.sweep.path / "storage.json").read_text())
    assert place["storage"] == f"sqlite:///{tmp_path}/a.db"
    monkeypatch.setenv("STUDY_URL", f"sqlite:///{tmp_path}/b.db")
    with pytest.raises(StorageError, match="and storage is now"):
        trials_of(reload_sweep(loaded.sweep.path))
    monkeypatch.delenv("STUDY_URL")
    with pytest.raises(StorageError, match="STUDY_URL is not set here"):
        trials_of(reload_sweep(loaded.sweep.path))


def test_a_study_of_another_sweep_in_a_shared_database_is_refused(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/shared.db"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    finish_study(begin_study(tmp_path / "one", storage=storage), 2)
    second = begin_study(tmp_path / "two", storage=storage)
    with pytest.raises(StorageError, match="has a study mine already, of another sweep"):
        Storage(second.sweep, second.sweep.path)


def test_a_database_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    loaded = begin_study(tmp_path, storage=f"sqlite:///{tmp_path}/no/such/folder.db")
    with pytest.raises(StorageError, match=r"folder\.db cannot be opened: unable to open database"):
        Storage(loaded.sweep, loaded.sweep.path)


def test_a_torn_line_of_a_journal_is_cut_before_more_is_written(tmp_path: Path) -> None:
    loaded = begin_study(tmp_path, storage="journal")
    finish_study(loaded, 3)
    path = loaded.sweep.path / "study.journal"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code":4,"worker')
    assert len(trials_of(loaded)) == 3, "a reader leaves it out"
    storage = Storage(loaded.sweep, loaded.sweep.path)
    storage.keep(2, "note", "after")
    storage.close()
    assert trials_of(loaded)[2].kept["note"] == "after"
    assert path.read_bytes().startswith(whole)
    cut_torn_end(tmp_path / "none")
    assert not (tmp_path / "none").exists()
