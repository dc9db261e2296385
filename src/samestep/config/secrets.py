"""Recognizes variables that hold secrets; a config names them without holding them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_SECRET_WORDS = {
    "KEY", "KEYS", "TOKEN", "TOKENS", "SECRET", "SECRETS", "PASS", "PASSWORD", "PASSWD", "PASSPHRASE", "PWD", "CREDENTIAL",
    "CREDENTIALS", "CREDS", "AUTH", "AUTHORIZATION", "BEARER", "COOKIE", "PAT", "WEBHOOK", "WEBHOOKS", "DSN",
}  # fmt: skip
_SECRET_ENDINGS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "APIKEY", "CREDENTIALS")
_URL_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]*@")
_PASSWORD = re.compile(r"(://[^:/@\s]*:)\S*@")
"""Up to the last @ of a word: a password may hold any character, and more may be hidden than it is."""
_PASSWORD_OPTION = re.compile(r"([?&][^=&\s]*pass\w*=)[^&\s'\"]*", re.IGNORECASE)


def referred(value: str) -> str | None:
    """Return the variable that a value refers to; None if it is the value itself."""
    found = _REFERENCE.fullmatch(value)
    return None if found is None else found[1]


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable looks like a secret, by its name or as a URL with a password.

    By whole words: TOKENIZERS_PARALLELISM is none.
    """
    words = [word for word in re.split(r"[_\d]+", name.upper()) if word]
    named = words != ["PWD"] and any(word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS) for word in words)
    named = named or (len(words) > 1 and words[-1] == "API")  # WANDB_API, but no API_URL
    return named or _URL_WITH_PASSWORD.search(value) is not None


def without_passwords(text: str) -> str:
    """Return a text as others may read it: the passwords of the URLs in it are hidden, but for references."""

    def hidden(found: re.Match[str]) -> str:
        given = found[0].removeprefix(found[1]).removesuffix("@")
        end = "@" if found[0].endswith("@") else ""
        return f"{found[1]}{given if referred(given) else '***'}{end}"

    return _PASSWORD_OPTION.sub(hidden, _PASSWORD.sub(hidden, text))


def without_values(key: str, value: Any) -> Any:
    """Return what was set for a key, as a message may show it: the variables of launch.environment by name."""
    if key != "launch.environment" or not isinstance(value, Mapping):
        return value
    return dict.fromkeys(value, "...")
