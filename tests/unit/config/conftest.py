"""Fixtures of the config tests."""

import pytest


@pytest.fixture
def write(tmp_path):
    def write_text(text, name="digits.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_text
