"""The owner of each parameter, where optimizer states are sharded (`distributed.shard`).

Whole parameters have owners, never slices of them. An owner computes the norm of a gradient and the update
of a weight from the whole tensor, with the kernels, and so the bits, of a run in which every rank does.
Who owns what changes no bit, so it may depend on the world size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BYTES_OF_ABSENT = 17
"""Bytes of the storage of what `absent` returns: enough for an element of any type, and no multiple of two or more.

Tensors of one byte are never absent: no parameter that trains is of such a type.
"""


def absent(like: Tensor) -> Tensor:
    """Return what stands for a weight that this rank does not have (`shard: weights`): NaN, in no memory.

    Without memory at all a kernel that reads it would end the process.
    """
    storage = torch.UntypedStorage(_BYTES_OF_ABSENT, device=like.device)
    one = torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, 0, (1,), (1,))
    return one.fill_(float("nan")).as_strided(like.shape, (0,) * like.dim())


def is_held(tensor: Tensor) -> bool:
    """Return whether this rank has the tensor's numbers, and not what `absent` returns."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.element_size() == 1:
        return True
    return any(tensor.stride()) or tensor.untyped_storage().nbytes() != _BYTES_OF_ABSENT


class Owners:
    """The owner of each parameter; the same on every rank."""

    def __init__(self, params: Sequence[Tensor], rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.params = list(params)
        self.load = [0] * world
        """Bytes of the parameters of each rank."""
        self._of: dict[int, int] = {}
        self._strides = {id(param): torch.empty_like(param, device="meta").stride() for param in params}
        # The largest first, each to the rank with the least: none has more than the mean and one parameter.
        for at in sorted(range(len(params)), key=lambda at: (-params[at].nbytes, at)):
            owner = min(range(world), key=lambda rank: (self.load[rank], rank))
            self._of[id(params[at])] = owner
            self.load[owner] += params[at].nbytes

    def of(self, param: Tensor) -> int:
        """Return the rank that owns a parameter."""
        return self._of[id(param)]

    def has(self, param: Tensor) -> bool:
        """Return whether a rank owns a parameter, and not every rank has it, as a frozen one."""
        return id(param) in self._of

    def stride(self, param: Tensor) -> tuple[int, ...]:
        """Return how a parameter lies in memory, also where this rank does not have it."""
        return self._strides[id(param)]

    def is_mine(self, param: Tensor) -> bool:
        """Return whether this rank owns a parameter; what nobody owns, such as a frozen one, every rank has."""
        return self._of.get(id(param), self.rank) == self.rank

    def is_only_mine(self, param: Tensor) -> bool:
        """Return whether this rank owns a parameter, and no other rank has it."""
        return self._of.get(id(param)) == self.rank

    @property
    def balance(self) -> str:
        """The share of the largest owner, for the plan."""
        total = sum(self.load) or 1
        return f"the largest of {self.world} owners has {100 * max(self.load) / total:.0f} % of the parameters"
