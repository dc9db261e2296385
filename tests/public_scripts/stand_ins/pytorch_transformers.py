"""The names of transformers' first release that BERT-NER imports, on today's transformers."""

import torch
from torch.optim import AdamW, Optimizer
from transformers import BertConfig, BertForTokenClassification, BertTokenizer

__all__ = ["AdamW", "BertConfig", "BertForTokenClassification", "BertTokenizer"]
CONFIG_NAME, WEIGHTS_NAME = "config.json", "pytorch_model.bin"


def WarmupLinearSchedule(  # noqa: N802
    optimizer: Optimizer, warmup_steps: int, t_total: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule that rises for some steps, then falls to 0."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return step / max(1, warmup_steps)
        return max(0.0, (t_total - step) / max(1.0, t_total - warmup_steps))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
