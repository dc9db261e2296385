"""Writing a failure to the file where the launcher's agent looks for it."""

from __future__ import annotations

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from samestep.environment.variables import has_agent, process_environment


def record_failure(error: BaseException) -> None:
    """Write this rank's exception where torch's elastic agent looks, if one started us."""
    if not has_agent(process_environment()):
        return
    handler = get_error_handler()
    handler.initialize()
    handler.record_exception(error)
