"""Signatures: what somebody without the secret made is refused."""

from __future__ import annotations

import os
import subprocess

import pytest

from samestep.environment.secret import (
    SECRET,
    SHELL_SECRET,
    Signer,
    claimed,
    message_of,
    new_secret,
    receive_secret,
    signed,
    signer_of,
)
from samestep.errors import LaunchError, NotAuthentic

SIGNER = Signer("s" * 32, "tests")


def test_a_signed_message_is_read_again() -> None:
    assert SIGNER.verified(SIGNER.sign(b"hello")) == b"hello"
    assert SIGNER.verified(SIGNER.sign(b"")) == b""


@pytest.mark.parametrize(
    "forged",
    [
        b"",
        b"short",
        bytes(32) + b"hello",
        SIGNER.sign(b"hello") + b"!",
        SIGNER.sign(b"hello")[:-1],
        Signer("t" * 32, "tests").sign(b"hello"),
        Signer("s" * 32, "another purpose").sign(b"hello"),
    ],
)
def test_anything_else_is_refused(forged: bytes) -> None:
    with pytest.raises(NotAuthentic):
        SIGNER.verified(forged)


def test_without_a_secret_messages_are_not_checked_but_signed_ones_are_noticed() -> None:
    assert message_of(None, signed(None, b"hello")) == b"hello"
    assert claimed(SIGNER.sign(b"hello")) == b"hello"
    with pytest.raises(NotAuthentic, match=f"{SECRET} is not set here"):
        message_of(None, SIGNER.sign(b"hello"))
    with pytest.raises(NotAuthentic):
        message_of(SIGNER, signed(None, b"hello"))


def test_the_secret_of_the_environment() -> None:
    assert signer_of({}, "x") is None
    assert signer_of({SECRET: ""}, "x") is None
    assert signer_of({SECRET: new_secret()}, "x") is not None
    with pytest.raises(LaunchError, match="can be guessed"):
        signer_of({SECRET: "1234"}, "x")


def test_no_two_secrets_are_the_same() -> None:
    assert len({new_secret() for _ in range(20)}) == 20


def test_a_script_makes_another_secret_each_time() -> None:
    line = f"{SHELL_SECRET}\nprintenv {SECRET}"
    printed = [subprocess.check_output(["bash", "-ec", line], text=True) for _ in range(2)]
    assert all(len(text.strip()) == 64 for text in printed)
    assert printed[0] != printed[1]


def test_a_secret_is_taken_from_the_first_line_of_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "")
    reading, writing = os.pipe()
    os.write(writing, b"abc\nrest")
    before = os.dup(0)
    try:
        os.dup2(reading, 0)
        receive_secret()
        assert os.environ[SECRET] == "abc"
        assert os.read(0, 10) == b"rest"
    finally:
        os.dup2(before, 0)
        for file in (before, reading, writing):
            os.close(file)
