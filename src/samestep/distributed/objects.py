"""Objects between ranks: pickled, and unpickled only if a rank of this launch signed them.

torch's own functions for objects unpickle whatever arrives, and unpickling runs code.
"""

from __future__ import annotations

import pickle
from typing import Any

from samestep.environment.secret import Signer, message_of, signed


def packed(value: Any, signer: Signer | None) -> bytes:
    """Return an object as signed bytes."""
    return signed(signer, pickle.dumps(value))


def unpacked(data: bytes, signer: Signer | None) -> Any:
    """Return the object of `packed`; raises `NotAuthentic` before anything of others is unpickled."""
    return pickle.loads(message_of(signer, data))
