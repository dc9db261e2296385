"""Ports that follow from a name, so that all who know the name find each other. No torch here."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from samestep.environment.node_lists import expand_hosts

_FIRST_PORT, _PORTS, _TRIES = 20000, 12000, 8
"""Below the ports that Linux gives to outgoing connections."""


def meeting_ports(job: str) -> tuple[int, ...]:
    """The ports at which a job's ranks may meet, the same for all that know its name."""
    start = zlib.crc32(job.encode())
    return tuple(_FIRST_PORT + (start + 997 * again) % _PORTS for again in range(_TRIES))


def job_rendezvous(environ: Mapping[str, str]) -> str:
    """HOST:PORT where the agents of a Slurm job meet: on its first node; nothing outside of one."""
    nodes, job = environ.get("SLURM_JOB_NODELIST"), environ.get("SLURM_JOB_ID")
    if nodes is None or job is None:
        return ""
    step = f"agents of step {job}.{environ.get('SLURM_STEP_ID')}"
    return f"{expand_hosts(nodes)[0]}:{meeting_ports(step)[0]}"
