"""A small GPT on the characters of a text, in nanoGPT's style: get_batch, own schedule, checkpoints."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

import samestep

TEXT = "".join(f"{a} plus {b} is {a + b}. " for a in range(40) for b in range(20))


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, c // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            dropout_p=self.dropout if self.training else 0, is_causal=True,
        )  # fmt: skip
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, block_size, width=32, heads=4, layers=2, dropout=0.1):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x, y):
        places = torch.arange(x.shape[1], device=x.device)
        h = self.blocks(self.tokens(x) + self.positions(places))
        logits = self.head(self.ln(h))
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


def get_lr(args, step):
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.max_iters - args.warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-iters", type=int, default=12)
    parser.add_argument("--eval-interval", type=int, default=6)
    parser.add_argument("--eval-iters", type=int, default=2)
    parser.add_argument("--grad-clip", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="out", help="folder of the checkpoint")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    run = samestep.start(
        global_batch=args.batch_size, steps=args.max_iters, seed=args.seed, run_dir=args.out,
        resume={"checkpoint": "auto" if args.resume else "never"},
    )  # fmt: skip
    device = run.device

    letters = sorted(set(TEXT))
    tokens = torch.tensor([letters.index(letter) for letter in TEXT])
    splits = {"train": tokens[: len(tokens) * 9 // 10], "val": tokens[len(tokens) * 9 // 10 :]}

    def get_batch(split, size=args.batch_size):
        data = splits[split]
        ix = torch.randint(len(data) - args.block_size, (size,))
        x = torch.stack([data[i : i + args.block_size] for i in ix])
        y = torch.stack([data[i + 1 : i + 1 + args.block_size] for i in ix])
        return x.to(device), y.to(device)

    model = GPT(len(letters), args.block_size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    model, optimizer = run.prepare(model, optimizer)

    @run.no_lanes()
    @torch.no_grad()
    def estimate_loss():
        model.eval()
        out = {}
        for split in ("train", "val"):
            losses = torch.zeros(args.eval_iters)
            for k in range(args.eval_iters):
                x, y = get_batch(split)
                _, loss = model(x, y)
                losses[k] = loss.item()
            out[split] = losses.mean()
        model.train()
        return out

    for step, (x, y) in run.enumerate(samestep.Generated(lambda _, n: get_batch("train", n))):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(args, step)
        _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % args.eval_interval == 0:
            losses = estimate_loss()
            run.print(f"step {step}: loss {losses['train']:.4f}, val {losses['val']:.4f}")
            run.save()


if __name__ == "__main__":
    main()
