"""Ports that follow from a name."""

from __future__ import annotations

import pytest

from samestep.environment.node_lists import job_rendezvous, rendezvous_ports


def test_jobs_meet_at_their_own_ports_below_the_ephemeral_ones() -> None:
    first, second = rendezvous_ports("7.0"), rendezvous_ports("8.0")
    assert len(set(first)) == len(first) == 8
    assert not set(first) & set(second)
    assert all(20000 <= port < 32000 for port in first + second)


JOB = {"SLURM_JOB_NODELIST": "n[03-05]", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


def test_agents_of_a_job_meet_on_its_first_node() -> None:
    host, port = job_rendezvous(JOB).split(":")
    assert host == "n03"
    assert int(port) in rendezvous_ports("agents of step 7.0")
    assert job_rendezvous({**JOB, "SLURM_STEP_ID": "1"}) != job_rendezvous(JOB)


@pytest.mark.parametrize("missing", ["SLURM_JOB_NODELIST", "SLURM_JOB_ID"])
def test_outside_of_a_job_there_is_no_meeting_place(missing: str) -> None:
    assert job_rendezvous({name: value for name, value in JOB.items() if name != missing}) == ""
