"""The storage of a sweep's trials: a file in its directory, or a database by its URL.

A URL's password is in the environment and in the connection, and nowhere else: files, messages and trackers
get the text of the sweep's file, in which `${NAME}` stands for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.config.secrets import is_secret, referred, without_passwords
from samestep.environment.variables import process_environment
from samestep.errors import RunDirError, StorageError, TextError
from samestep.sweep.optuna_parts import import_optuna

if TYPE_CHECKING:
    from sqlalchemy.engine import URL

FILES = {"sqlite": "study.db", "journal": "study.journal"}
"""What `storage` names without a URL: files in the sweep's directory."""
_BACKENDS = ("postgresql", "mysql", "mariadb", "sqlite")
_EXAMPLE = "postgresql://user:${PASSWORD}@host/name"
_PACKAGES = {"psycopg2": "psycopg2-binary", "psycopg": "'psycopg[binary]'", "MySQLdb": "mysqlclient"}
"""What a driver's module is installed by, where that has another name."""
_OPTIONS = frozenset({
    "application_name", "charset", "connect_timeout", "password", "ssl_ca", "ssl_cert", "ssl_key", "sslcert", "sslkey", "sslmode",
    "sslrootcert", "timeout",
})  # fmt: skip
"""What a URL may say besides where the database is."""
_SECONDS_TO_CONNECT = 10
_TIMEOUTS = dict.fromkeys(("psycopg2", "psycopg", "mysqldb", "pymysql"), "connect_timeout")
"""By driver: what limits how long it waits for a machine that does not answer."""


@dataclass(frozen=True)
class Database:
    """An open storage of Optuna's, for one sweep or for several."""

    storage: Any
    name: str
    """What tells it from others, for messages and comparisons; without user and password."""
    is_shared: bool
    """Whether other sweeps may keep their trials in it, too."""
    secret: str = ""

    def close(self) -> None:
        """Let go of it."""
        engine = getattr(self.storage, "engine", None)  # a journal has none
        if engine is not None:
            engine.dispose()

    def error(self, what: str, error: Exception) -> StorageError:
        """Return what Optuna or SQLAlchemy has raised, which have no root in common, without the password."""
        return StorageError(f"{self.name} {what}: {_reason(error, self.secret)}")

    @contextmanager
    def reraise_os_errors(self, folder: Path) -> Iterator[None]:
        """Turn what a database or a disk refuses while a sweep runs into an error that names it."""
        from sqlalchemy.exc import SQLAlchemyError

        again = f"All until then is kept: once that is solved, samestep sweep run {folder}"
        try:
            yield
        except (SQLAlchemyError, import_optuna().exceptions.StorageInternalError) as error:
            raise StorageError(f"{self.name} cannot be used any more: {_reason(error, self.secret)}. {again}") from None
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise RunDirError(
                f"{folder} cannot be written any more: {error.strerror or error}{where}. {again}"
            ) from None


def check_storage(storage: str) -> None:
    """Raise if a sweep cannot use this as its storage, as far as that is known without a connection.

    Raises:
        TextError: if it is neither the name of a file nor the URL of a database that can be used here.
    """
    if storage not in FILES:
        _import_driver(_url(storage, process_environment()))


def name_of(storage: str, folder: Path) -> str:
    """Return what tells a storage from others.

    Raises:
        StorageError: if a variable that it names is not set.
    """
    if storage in FILES:
        return f"{storage} ({folder / FILES[storage]})"
    try:
        return _name(_url(storage, process_environment()))
    except TextError as error:
        raise StorageError(f"storage: {error}") from None


def open_database(storage: str, folder: Path, *, write: bool = True) -> Database:
    """Open a sweep's storage.

    Raises:
        StorageError: if it cannot be reached, or is no storage of this Optuna's.
    """
    optuna, name = import_optuna(), name_of(storage, folder)
    path = folder.resolve() / FILES.get(storage, "")
    secret = ""
    try:
        if storage == "journal":
            if write:
                cut_torn_end(path)
            backend = optuna.storages.journal.JournalFileBackend(str(path))
            return Database(optuna.storages.JournalStorage(backend), name, is_shared=False)
        if storage == "sqlite":
            return Database(_rdb(f"sqlite:///{path}", _patience("pysqlite")), name, is_shared=False)
        url = _url(storage, process_environment())
        secret = url.password or ""
        _import_driver(url)
        found = _rdb(url.render_as_string(hide_password=False), _patience(url.get_driver_name()))
    except Exception as error:  # SQLAlchemy's, Optuna's and the drivers' have no root in common
        raise StorageError(f"{name} cannot be opened: {_reason(error, secret)}") from None
    return Database(found, name, is_shared=True, secret=secret)


def cut_torn_end(path: Path) -> None:
    """Remove the line of a journal that a full disk or a crash has left without its end.

    What is appended to it would be one line with it, and the whole journal unreadable.
    """
    if not path.is_file():
        return
    with path.open("rb+") as file:
        kept = file.read()
        whole = kept.rfind(b"\n") + 1
        if whole < len(kept):
            file.truncate(whole)


def _rdb(url: str, connect: Mapping[str, Any]) -> Any:
    # A connection may have been closed by the server since the last trial ended.
    given = {"connect_args": dict(connect), "pool_pre_ping": True}
    return import_optuna().storages.RDBStorage(url, engine_kwargs=given)


def _patience(driver: str) -> dict[str, Any]:
    if driver == "pysqlite":
        return {"timeout": 60}  # a reader may hold the file for a moment
    return {_TIMEOUTS[driver]: _SECONDS_TO_CONNECT} if driver in _TIMEOUTS else {}


def _url(text: str, environ: Mapping[str, str]) -> URL:
    """Return the URL that a text is; raises a `TextError` that holds no password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    shown = without_passwords(text)
    whole = referred(text)
    try:
        url = make_url(text if whole is None else _variable(whole, environ))
    except (ArgumentError, ValueError):
        wanted = f"sqlite, journal, or a database's URL, such as {_EXAMPLE}"
        raise TextError(f"you set {shown!r}: it takes {wanted}") from None
    if url.get_backend_name() not in _BACKENDS:
        known = ", ".join(_BACKENDS)
        raise TextError(f"{url.get_backend_name()} is not supported: there are {known}")
    _refuse_options(url)
    if whole is None:
        _refuse_written_secrets(url)
        url = _with_variables(url, environ)
    if url.get_backend_name() == "sqlite" and not str(url.database or "").startswith("/"):
        raise TextError(
            f"you set {shown!r}, which depends on the directory that a command runs in: write the "
            "whole path, as sqlite:////path/studies.db"
        )
    return url


def _refuse_options(url: URL) -> None:
    """Refuse options that are handed to the driver: some let a server read any file of this machine."""
    other = sorted(set(url.query) - _OPTIONS)
    if other:
        raise TextError(
            f"sets {', '.join(other)}, which a storage may not: of a driver's options there are "
            f"{', '.join(sorted(_OPTIONS))}"
        )


def _refuse_written_secrets(url: URL) -> None:
    written = [("its password", url.password or "")]
    written += [(key, str(value)) for key, value in url.query.items() if is_secret(key, "")]
    for what, value in written:
        if value and referred(str(value)) is None:
            raise TextError(
                f"holds {what}, and a sweep's file is stored with the sweep: write ${{NAME}} in its place, "
                f"such as {_EXAMPLE}, and set that variable where the sweep runs"
            )


def _with_variables(url: URL, environ: Mapping[str, str]) -> URL:
    """Return a URL with the values of variables; by its parts, so that no character of a password ends one."""

    def filled(part: str | None) -> str | None:
        if part is None:
            return None
        return re.sub(r"\$\{(\w+)\}", lambda found: _variable(found[1], environ), part)

    query = {key: filled(value) if isinstance(value, str) else value for key, value in url.query.items()}
    return url.set(
        username=filled(url.username),
        password=filled(url.password),
        host=filled(url.host),
        database=filled(url.database),
        query=query,  # type: ignore[arg-type]  # None only for None
    )


def _variable(name: str, environ: Mapping[str, str]) -> str:
    if not environ.get(name):
        raise TextError(f"the variable {name} is not set here: it holds what ${{{name}}} stands for")
    return environ[name]


def _import_driver(url: URL) -> None:
    from sqlalchemy.exc import NoSuchModuleError

    try:
        url.get_dialect().import_dbapi()
    except NoSuchModuleError:
        raise TextError(f"{url.drivername} is not a driver that SQLAlchemy knows") from None
    except ImportError as error:
        module = (error.name or url.get_driver_name()).partition(".")[0]
        package = _PACKAGES.get(module, module)
        raise TextError(
            f"{url.drivername} needs the package {module}, which is not installed: pip install {package}"
        ) from None


def _name(url: URL) -> str:
    # Not the driver, which may be another one next time, and nobody's name or password.
    where = "" if url.host is None else url.host + ("" if url.port is None else f":{url.port}")
    return f"{url.get_backend_name()}://{where}/{url.database or ''}"


def _reason(error: Exception, secret: str) -> str:
    """Return what a library reports, on one line, without the password, a statement, or where to read more."""
    cause: Any = error.__cause__ if error.__cause__ is not None else error
    text = str(getattr(cause, "orig", None) or cause) or type(error).__name__
    text = " ".join(text.split("\n(Background")[0].split())
    return without_passwords(text.replace(secret, "***") if secret else text)
