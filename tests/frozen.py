"""Imported last by servers that fork: pays once for what each forked process would pay for again.

Some libraries look something up when it is first needed: torchmetrics the versions of installed packages,
which takes a tenth of what a run of our tests does. And a collection in a forked process would look at every
object of torch's modules, and by that copy the memory that it shares with the server.
"""

import encodings.idna  # noqa: F401  (of the first connection)
import gc

import psutil  # noqa: F401  (of the first process group)
import torch.utils.serialization.config  # noqa: F401  (of the first tensor that is unpickled)
from lightning_utilities.core.imports import RequirementCache
from torchmetrics.utilities import imports as looked_up

for flag in vars(looked_up).values():
    if isinstance(flag, RequirementCache):
        bool(flag)

gc.collect()
gc.freeze()
