"""Ports derived from a name, so that all processes that know the name meet. No torch here."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from samestep.environment.node_lists import expand_hosts

_FIRST_PORT, _PORTS, _TRIES = 20000, 12000, 8
"""Below the ports that Linux uses for outgoing connections."""


def rendezvous_ports(job: str) -> tuple[int, ...]:
    """Return the ports at which a job's ranks may meet: the same in every process that knows its name."""
    start = zlib.crc32(job.encode())
    return tuple(_FIRST_PORT + (start + 997 * again) % _PORTS for again in range(_TRIES))


def job_rendezvous(environ: Mapping[str, str]) -> str:
    """HOST:PORT where the agents of a Slurm job meet: on its first node; empty outside of a job."""
    nodes, job = environ.get("SLURM_JOB_NODELIST"), environ.get("SLURM_JOB_ID")
    if nodes is None or job is None:
        return ""
    step = f"agents of step {job}.{environ.get('SLURM_STEP_ID')}"
    return f"{expand_hosts(nodes)[0]}:{rendezvous_ports(step)[0]}"
