"""Models of sequences, and of language."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import TensorDataset

from samestep import LaneBatch
from tests.sameness.models.base import CLASSES, FEATURES, Classify, sentences

WORDS = 23


class PackedLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        lengths = (words != 0).sum(1).cpu()
        packed = pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.last(out.sum(1))


class Sentences(Classify):
    """Sentences of different lengths, padded to the longest of the lane."""

    def train_data(self) -> Any:
        return sentences(self.samples, WORDS)

    def collate(self, samples: list[Any]) -> Any:
        return pad_sequence(samples, batch_first=True)


class LSTM(Sentences):
    """With packed sequences and dropout between its layers."""

    def model(self) -> nn.Module:
        return PackedLSTM()

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        target = batch.data.sum(1) % CLASSES
        return F.cross_entropy(model(batch.data), target, reduction="sum"), len(batch)


class Detached(Classify):
    """A recurrent network over a long series in pieces; its state goes from one to the next."""

    def model(self) -> nn.Module:
        return nn.ModuleDict({"rnn": nn.GRU(2, 8, batch_first=True), "last": nn.Linear(8, 2)})

    def train_data(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        steps = torch.randn(self.samples, 25, 2, generator=generator)
        return TensorDataset(steps.cumsum(1))

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        series, state = batch.x, None
        total = series.new_zeros(())
        for piece, target in zip(series[:, :-1].split(6, 1), series[:, 1:].split(6, 1), strict=True):
            out, state = model["rnn"](piece, state)
            state = state.detach()
            total = total + F.mse_loss(model["last"](out), target, reduction="sum")
        return total, series[:, 1:].numel()


class TiedNet(nn.Module):
    """One embedding at both ends, and a layer that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.never = nn.Linear(16, 16)
        self.out = nn.Linear(16, WORDS, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        size = words.shape[1]
        future = torch.ones(size, size, dtype=torch.bool, device=words.device).triu(1)
        return self.out(self.layer(self.embed(words), src_mask=future))


class TiedLanguage(Sentences):
    """Next words, of which some are masked: the count is the words that are left."""

    def model(self) -> nn.Module:
        return TiedNet()

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        words, targets = batch.data[:, :-1], batch.data[:, 1:]
        counted = (targets != 0) & (torch.rand(targets.shape, device=targets.device) > 0.2)
        losses = F.cross_entropy(model(words).transpose(1, 2), targets, reduction="none")
        return (losses * counted).sum(), counted.sum()


class ExpertsNet(nn.Module):
    """Each sample goes to one of the experts; with few samples in a lane, some get none."""

    def __init__(self, experts: int = 6) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, experts)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, 8) for _ in range(experts))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        chosen = weights.argmax(1)
        out = x.new_zeros(len(x), 8)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero()[:, 0]
            value = self.experts[number](x[rows]) * weights[rows, number, None]
            out = out.index_add(0, rows, value)
        return self.last(out)


class MixtureOfExperts(Classify):
    def model(self) -> nn.Module:
        return ExpertsNet()


class Encoder(Sentences):
    """A BERT of Hugging Face with random weights: masked words."""

    def model(self) -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            vocab_size=WORDS + 1, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=16,
        )  # fmt: skip
        return BertForMaskedLM(config)

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        words = batch.data
        masked = (torch.rand(words.shape, device=words.device) < 0.3) & (words != 0)
        masked[:, 0] = True
        logits = model(words.masked_fill(masked, WORDS), attention_mask=words != 0).logits
        targets = words.masked_fill(~masked, -100)
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="sum"), masked.sum()


class Decoder(Sentences):
    """A GPT-2 of Hugging Face with random weights: next words."""

    def model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
        )
        return GPT2LMHeadModel(config)

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        words, targets = batch.data[:, :-1], batch.data[:, 1:]
        logits = model(words, use_cache=False).logits.transpose(1, 2)
        loss = F.cross_entropy(logits, targets, ignore_index=0, reduction="sum")
        return loss, (targets != 0).sum()
