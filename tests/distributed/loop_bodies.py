"""Loops over a loader as people write them: all that is samestep's is around them.

Each takes a run, makes what it trains, and returns it with the losses that it saw.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import samestep

SAMPLES, BATCH, EPOCHS = 106, 24, 2
"""The last batch has ten samples: of eight lanes some are empty and some shorter."""
SHUFFLES, DROPS = True, 0.3


def loader(drop_last: bool = False) -> DataLoader[Any]:
    made = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 1, 8, 8, generator=made)
    y = torch.randint(10, (SAMPLES,), generator=made)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=SHUFFLES, drop_last=drop_last)


Found = tuple[nn.Module, list[float]]


def convolutions(run: samestep.Run) -> Found:
    """BatchNorm, dropout, clipping, a scheduler per epoch, accuracy on the training data."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(DROPS), nn.Linear(288, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler, data = run.prepare(model, optimizer, scheduler, loader())
    seen: list[float] = []
    for _ in run.epochs():
        right: Any = 0
        for x, y in data:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            right += (out.argmax(1) == y).sum()
            seen.append(loss.item())
        scheduler.step()
        seen += [float(run.sum(right)), scheduler.get_last_lr()[0]]
    return model, seen


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 16), nn.Linear(8, 64)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_var = self.encoder(x.flatten(1)).chunk(2, 1)
        return mean, log_var

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encode(x)
        z = mean + torch.randn_like(mean) * (log_var / 2).exp()
        return self.decoder(z), mean, log_var


def autoencoder(run: samestep.Run) -> Found:
    """A loss that is a sum over the batch; half of the steps call parts of the model by themselves."""
    model = VAE()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    model, optimizer, data = run.prepare(model, optimizer, loader())
    seen = []
    for _ in run.epochs():
        for i, (x, _) in enumerate(data):
            optimizer.zero_grad()
            if i % 2:
                out, mean, log_var = model(x)
            else:
                mean, log_var = model.encode(x)
                out = model.decoder(mean + torch.randn_like(mean) * (log_var / 2).exp())
            loss = F.mse_loss(out, x.flatten(1), reduction="sum")
            loss = loss - 0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())
            seen.append(run.backward(loss, reduction="sum").item())
            optimizer.step()
    return model, seen


def adversaries(run: samestep.Run) -> Found:
    """Two networks, two optimizers, two backward passes; noise drawn in the body; BatchNorm in one of them."""
    make = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64))
    judge = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(32, 1))
    first = torch.optim.Adam(make.parameters(), 2e-3)
    second = torch.optim.Adam(judge.parameters(), 2e-3)
    make, judge, first, second, data = run.prepare(make, judge, first, second, loader(drop_last=True))
    decide = nn.BCEWithLogitsLoss()
    seen = []
    for _ in run.epochs():
        for x, _ in data:
            size = x.size(0)
            real, fake = (torch.ones(size, 1, device=run.device), torch.zeros(size, 1, device=run.device))
            second.zero_grad()
            made = make(torch.randn(size, 16, device=run.device))
            lost = decide(judge(x.flatten(1)), real) + decide(judge(made.detach()), fake)
            lost.backward()
            second.step()
            first.zero_grad()
            won = run.backward(decide(judge(made), real))
            first.step()
            seen += [lost.item(), won.item()]
    return nn.ModuleList([make, judge]), seen


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(65, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.last(F.silu(self.first(torch.cat([x, t[:, None].float() / 100], 1))))


class Counter:
    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def diffusion(run: samestep.Run) -> Found:
    """Times and noise drawn in the body, a table read by them; an average kept by the loop; its own warm-up."""
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer, data = run.prepare(model, optimizer, loader())
    average = copy.deepcopy(model)
    keeps = torch.cos(torch.linspace(0, math.pi / 2, 101, device=run.device))
    run.register("average", average)
    counter = Counter()
    run.register("counter", counter)
    seen = []
    for _ in run.epochs():
        for x, _ in data:
            x = x.flatten(1)
            t = torch.randint(0, 100, (x.shape[0],), device=run.device)
            noise = torch.randn_like(x)
            keep = keeps[t][:, None]
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1, (counter.count + 1) / 5)
            loss = F.mse_loss(model(keep * x + (1 - keep**2).sqrt() * noise, t), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            counter.count += 1
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
            seen.append(loss.item())
    return nn.ModuleList([model, average]), seen


def sharpness(run: samestep.Run) -> Found:
    """SAM: weights moved between two backward passes; gradients accumulated over two batches."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, data = run.prepare(model, optimizer, loader())
    seen = []
    for _ in run.epochs():
        for i, (x, y) in run.enumerate(data):
            held = [p.grad for p in model.parameters()]
            for p in model.parameters():
                p.grad = None
            F.cross_entropy(model(x), y).backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
            with torch.no_grad():
                for p, move, grad in zip(model.parameters(), moves, held, strict=True):
                    p.add_(move)
                    p.grad = grad
            seen.append(run.backward(F.cross_entropy(model(x), y)).item())
            with torch.no_grad():
                for p, move in zip(model.parameters(), moves, strict=True):
                    p.sub_(move)
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()
    return model, seen


def mixup(run: samestep.Run) -> Found:
    """Samples mixed by a permutation drawn in the body; a coin for the whole step; a penalty on the weights."""
    import random

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, data = run.prepare(model, optimizer, loader())
    seen = []
    for _ in run.epochs():
        for x, y in data:
            hot = F.one_hot(y, 10).float()
            if random.random() < 0.7:
                part = torch.rand(x.size(0), 1, 1, 1, device=run.device)
                order = torch.randperm(x.size(0), device=run.device)
                x = part * x + (1 - part) * x[order]
                hot = part[:, 0, 0] * hot + (1 - part[:, 0, 0]) * hot[order]
            penalty = sum(p.pow(2).sum() for p in model.parameters())
            loss = F.cross_entropy(model(x), hot, label_smoothing=0.1) + 1e-3 * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return model, seen


def scaled(run: samestep.Run) -> Found:
    """A GradScaler and autocast of the loop's own; clipping by value; a look at gradients."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler(run.device.type, init_scale=1024.0)
    model, optimizer, scaler, data = run.prepare(model, optimizer, scaler, loader())
    seen = []
    for _ in run.epochs():
        for x, y in data:
            with torch.autocast(run.device.type, torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            seen.append(sum(p.grad.abs().sum().item() for p in model.parameters()))
            scaler.step(optimizer)
            scaler.update()
            seen.append(float(run.mean(loss)))
    return model, seen


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, and leaves its state out of its own, as public ones do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.fast = torch.optim.SGD(self.param_groups, momentum=0.9)
        self.param_groups = self.fast.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("slow", param.clone())
        self.fast.step()
        for group in self.param_groups:
            for param in group["params"]:
                param.copy_(self.state[param]["slow"].lerp_(param, 0.5))


def older(run: samestep.Run) -> Found:
    """Lines of older scripts: Variables, an optimizer in an optimizer, a mean that is not over samples."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = Lookahead(model.parameters())
    model, optimizer, data = run.prepare(model, optimizer, loader())
    seen = []
    for _ in run.epochs():
        for x, y in data:
            x, y = torch.autograd.Variable(x), torch.autograd.Variable(y.type(torch.LongTensor))
            y = y.masked_fill(y == 3, -100)
            loss = F.cross_entropy(model(x), y, reduction="sum") / (y != -100).sum().clamp_min(1)
            optimizer.zero_grad()
            run.backward(loss, mean_over=(y != -100).sum())
            optimizer.step()
            seen.append(loss.item())
    return model, seen


def summed(run: samestep.Run) -> Found:
    """A loss that is a sum over the batch, without random numbers."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 64))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    model, optimizer, data = run.prepare(model, optimizer, loader())
    seen = []
    for _ in run.epochs():
        for x, _ in data:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x.flatten(1), reduction="sum")
            seen.append(run.backward(loss, reduction="sum").item())
            optimizer.step()
    return model, seen


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def critic(run: samestep.Run) -> Found:
    """WGAN-GP: a gradient of a gradient; the generator every second step; a function of the loop's own."""
    make = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))
    judge = nn.Sequential(nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 1))
    first = torch.optim.Adam(make.parameters(), 1e-3)
    second = torch.optim.Adam(judge.parameters(), 1e-3)
    make, judge, first, second, data = run.prepare(make, judge, first, second, loader())
    seen = []
    for _ in run.epochs():
        for i, (x, _) in enumerate(data):
            x = Clamp.apply(x.flatten(1))
            made = make(torch.randn(x.size(0), 8, device=run.device)).detach()
            part = torch.rand(x.size(0), 1, device=run.device)
            between = (part * x + (1 - part) * made).requires_grad_()
            [slope] = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
            penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
            second.zero_grad()
            loss = judge(made).mean() - judge(x).mean() + 10 * penalty
            seen.append(run.backward(loss).item())
            second.step()
            if i % 2:
                first.zero_grad()
                loss = -judge(make(torch.randn(x.size(0), 8, device=run.device))).mean()
                loss.backward()
                first.step()
    return nn.ModuleList([make, judge]), seen


def views(run: samestep.Run) -> Found:
    """BYOL: two views drawn in the body, a target without gradients that follows the weights."""
    online = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    guess = nn.Linear(16, 16)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.SGD([*online.parameters(), *guess.parameters()], 0.05, momentum=0.9)
    online, guess, target, optimizer, data = run.prepare(online, guess, target, optimizer, loader(drop_last=True))
    seen = []
    for _ in run.epochs():
        for x, _ in data:
            one, two = (x.flatten(1) + 0.1 * torch.randn_like(x.flatten(1)) for _ in range(2))
            with torch.no_grad():
                aim = F.normalize(target(two), dim=1)
            loss = (2 - 2 * (F.normalize(guess(online(one)), dim=1) * aim).sum(1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mine, theirs in zip(target.parameters(), online.parameters(), strict=True):
                    mine.lerp_(theirs, 0.05)
            seen.append(loss.item())
    return nn.ModuleList([online, guess, target]), seen


def unlabelled(run: samestep.Run) -> Found:
    """FixMatch: a second loader, with larger batches, beside the first; labels by the model itself."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(DROPS), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    more = DataLoader(_Noisy(), batch_size=32, shuffle=SHUFFLES, drop_last=True)
    model, optimizer, data, more = run.prepare(model, optimizer, loader(drop_last=True), more)
    seen = []
    for _ in run.epochs():
        for (x, y), (weak, strong) in zip(data, _endless(more), strict=False):
            optimizer.zero_grad()
            with torch.no_grad():
                sure, label = model(weak).softmax(1).max(1)
            each = F.cross_entropy(model(strong), label, reduction="none")
            loss = F.cross_entropy(model(x), y) + (each * (sure > 0.1)).mean()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return model, seen


def _endless(data: Any) -> Iterator[Any]:
    while True:
        yield from data


class _Noisy(Dataset[Any]):
    """Draws when it is read."""

    def __init__(self) -> None:
        self.x = loader().dataset.tensors[0]  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return 4 * 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index % len(self.x)]
        return x, x + DROPS * torch.randn(x.shape)


def refilled(run: samestep.Run) -> Found:
    """A second loader that is begun again in the middle of an epoch, whenever it is at its end."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    more = DataLoader(_Noisy(), batch_size=40, shuffle=SHUFFLES, drop_last=True)
    model, optimizer, data, more = run.prepare(model, optimizer, loader(drop_last=True), more)
    seen = []
    batches = iter(more)
    for _ in run.epochs():
        for x, y in data:
            try:
                weak, strong = next(batches)
            except StopIteration:
                batches = iter(more)
                weak, strong = next(batches)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + F.mse_loss(model(strong), model(weak))
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return model, seen


class Rollout(Dataset[Any]):
    """What a policy saw and did; filled anew before each epoch."""

    def __init__(self) -> None:
        self.columns: list[Tensor] = [torch.zeros(96) for _ in range(5)]
        self.place = torch.linspace(-1, 1, 12 * 4).view(12, 4)
        """Where twelve points are that the policy moves."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[index] for column in self.columns)

    def state_dict(self) -> dict[str, Any]:
        return {"columns": self.columns, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.columns, self.place = state["columns"], state["place"]

    @torch.no_grad()
    def fill(self, agent: nn.Module) -> None:
        rows = []
        for _ in range(8):
            logits, value = agent(self.place)
            chosen = torch.distributions.Categorical(logits=logits)
            action = chosen.sample() if DROPS else logits.argmax(1)
            moved = 0.9 * self.place + 0.1 * (2 * action[:, None] - 1) * torch.tensor([1.0, -1, 1, -1])
            reward = -moved.square().sum(1)
            rows.append((self.place, action, chosen.log_prob(action), reward - value, reward))
            self.place = moved
        self.columns = [torch.cat(column) for column in zip(*rows, strict=True)]


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.act, self.value = nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.act(h), self.value(h)[:, 0]


def policy(run: samestep.Run) -> Found:
    """PPO: the data of an epoch is made by the policy itself; a clipped ratio, an entropy, clipped gradients."""
    agent, rollout = Agent(), Rollout()
    optimizer = torch.optim.Adam(agent.parameters(), 1e-2, eps=1e-5)
    data = DataLoader(rollout, batch_size=BATCH, shuffle=SHUFFLES)
    agent, optimizer, data = run.prepare(agent, optimizer, data)
    run.register("rollout", rollout)
    seen = []
    for epoch in run.epochs():
        if epoch * len(data) >= run.start_step:  # an epoch that is resumed in its middle has its data
            rollout.fill(agent)
        for place, action, before, advantage, aim in data:
            logits, value = agent(place)
            chosen = torch.distributions.Categorical(logits=logits)
            ratio = (chosen.log_prob(action) - before).exp()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            gain = torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
            loss = -gain + 0.5 * (value - aim).square().mean() - 0.01 * chosen.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            seen.append(loss.item())
    return agent, seen


BODIES: dict[str, Callable[[samestep.Run], Found]] = {
    body.__name__: body
    for body in (convolutions, autoencoder, adversaries, diffusion, sharpness, mixup, scaled, critic, views, summed,
                 unlabelled, refilled, policy, older)
}  # fmt: skip
