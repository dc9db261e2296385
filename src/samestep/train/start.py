"""Opens a run for a person's own loop."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn
from typing_extensions import Unpack

from samestep.config import Config, load_config, override_config
from samestep.config.keywords import ConfigKeywords
from samestep.distributed.context import create_run_context
from samestep.distributed.hardware import detect_hardware
from samestep.environment.variables import OVERRIDES, process_environment, script_overrides
from samestep.errors import ConfigError, Mistake, TextError
from samestep.run.run import Run
from samestep.tracebacks import show_own_frames
from samestep.train.requests import requested


def _modules_of(frame: FrameType) -> list[nn.Module]:
    """Return the modules that have a name where a frame is: those made before it called."""
    named = {**frame.f_globals, **frame.f_locals}
    return [value for value in named.values() if isinstance(value, nn.Module)]


def start(
    config: Config | str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    **keys: Unpack[ConfigKeywords],
) -> Run:
    """Open a run on this process: a single process, or a rank of whatever launched it.

    A script that calls this is a run for `samestep train`, `launch` and `verify`, too; the
    overrides of their command lines come after these. For `python script.py`, and a script with
    arguments of its own, the variable SAMESTEP_ARGS holds overrides: `SAMESTEP_ARGS="resume=never"`.

    Args:
        config: A config, the path of a YAML or JSON file, or a mapping of its keys.
        overrides: Values that replace the config's, as `section.key=value`.
        **keys: The config's keys, in place of a config; sections are mappings. Without `global_batch`
            it is the batch size of the first DataLoader that `run.prepare` gets.

    Returns:
        The run; as a context manager it is closed at the end of the block, otherwise when the process
        ends.

    Example:
        with samestep.start(epochs=3, clip={"norm": 1.0}) as run:
            model, optimizer, loader = run.prepare(model, optimizer, loader)
            for step in run.steps(loader):
                step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
    """
    show_own_frames()
    if config is not None and keys:
        raise ConfigError(
            "samestep.start", [Mistake(name, "give a config or keywords, not both: use overrides") for name in keys]
        )
    if not isinstance(config, Config):
        config = load_config(dict(keys) if config is None else config, overrides)
    try:
        from_environment = script_overrides(process_environment())
    except TextError as error:
        raise ConfigError("samestep.start", [Mistake(OVERRIDES, str(error), "environment")]) from None
    if from_environment:
        config = override_config(config, from_environment)
    request = requested()
    config = request.configure(config)
    context = create_run_context(config, detect_hardware())
    try:
        run = Run(config, context)
    except BaseException:
        context.__exit__(*sys.exc_info())
        raise
    run.close_at_exit()
    run.note_earlier(_modules_of(sys._getframe(1)))
    try:
        request.observe(run)
    except BaseException:
        run.__exit__(*sys.exc_info())
        raise
    return run
