"""A resumed run's model on torch's meta device: it gets memory for what this rank holds, which the checkpoint then fills."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from samestep.errors import TaskError


def give_memory(model: nn.Module, holds: Callable[[Tensor], bool], is_resumed: bool) -> bool:
    """Give a model's tensors host memory where they are on the meta device; return whether some are.

    Args:
        holds: Returns whether this rank holds a parameter. Others keep their shape, without memory.

    Raises:
        TaskError: There is no checkpoint, or it does not have a tensor.
    """
    params = [param for param in model.parameters() if param.is_meta]
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_meta}
    if not params and not buffers:
        return False
    if not is_resumed:
        raise TaskError(
            f"the {type(model).__name__} is on the meta device, where it has no weights, and no checkpoint is resumed: "
            'build it there only in a resumed run, with torch.device("meta" if run.start_step else "cpu")'
        )
    unsaved = sorted(buffers.keys() - model.state_dict().keys())
    if unsaved:
        raise TaskError(
            f"the {type(model).__name__} is on the meta device, and {', '.join(unsaved)} is in no checkpoint "
            "(persistent=False): build the model on the CPU, or make these buffers there"
        )
    _refuse_what_is_lost(model)
    rnns = [part for part in model.modules() if isinstance(part, nn.RNNBase)]
    for rnn in rnns:
        rnn._flat_weight_refs = []  # weak ones, with which nothing can be swapped
    for param in params:
        memory = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="cpu")
        if not holds(param):
            memory.untyped_storage().resize_(0)
        made = Parameter(memory, param.requires_grad)
        made.__dict__.update(param.__dict__)
        torch.utils.swap_tensors(param, made)  # optimizers have it already
    for rnn in rnns:
        rnn._init_flat_weights()
    made_buffers: dict[int, Tensor] = {}  # one that several modules share stays one
    for part in model.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                like = torch.empty_like(buffer, device="cpu")
                part._buffers[name] = made_buffers.setdefault(id(buffer), like)
    return True


def _refuse_what_is_lost(model: nn.Module) -> None:
    """Refuse parameters whose hooks or class would not be there any more."""
    for name, param in model.named_parameters():
        hooks = param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None)
        if param.is_meta and (hooks or type(param) is not Parameter):
            what = "has hooks" if hooks else f"is a {type(param).__name__}"
            raise TaskError(
                f"{name} {what}, which a model on the meta device would lose when it gets memory: build it on the CPU"
            )
