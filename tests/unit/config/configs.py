"""What the config tests share: a valid config, its mistakes, its rows."""

import pytest

from samestep.config import load_config
from samestep.errors import ConfigError

GOOD = {"task": "task.py:Digits", "epochs": 3, "global_batch": 64}


def mistakes(source, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return {mistake.path: str(mistake) for mistake in caught.value.mistakes}


def rows(loaded):
    return {key: (value, origin) for key, value, origin in loaded.rows()}
