"""Prints what a process finds of its place in a run, as one line of JSON. Imports no torch."""

import json
import os
import socket

from samestep.environment.hardware import owned_cpus
from samestep.environment.launch import detect_launch

facts = detect_launch(dict(os.environ))
print(
    json.dumps(
        {
            "host": socket.gethostname(),
            "launcher": facts.launcher,
            "rank": facts.rank,
            "world": facts.world,
            "local_rank": facts.local_rank,
            "local_world": facts.local_world,
            "node_rank": facts.node_rank,
            "nodes": facts.nodes,
            "master": facts.master_addr,
            "port": facts.master_port,
            "job": facts.job,
            "cpus": facts.cpus_per_rank and facts.cpus_per_rank.value,
            "cpus_here": owned_cpus(dict(os.environ)).value,
        }
    ),
    flush=True,
)
