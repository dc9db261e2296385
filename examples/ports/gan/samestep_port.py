"""A GAN with two optimizers that learns the points of a ring; the networks take turns."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import samestep

NOISE = 4


def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


def score(logits, real):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--n-critic", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", default="", help="file for the generator's weights")
    args = parser.parse_args()
    run = samestep.start(epochs=args.epochs, seed=args.seed, name="gan")
    device = run.device

    angles = torch.linspace(0, 2 * math.pi, 512)
    points = TensorDataset(torch.stack([angles.cos(), angles.sin()], 1))
    loader = DataLoader(points, batch_size=args.batch_size, shuffle=True)
    generator = network(NOISE, 2).to(device)
    critic = network(2, 1).to(device)
    generator_opt = optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.99))
    critic_opt = optim.Adam(critic.parameters(), lr=args.lr, betas=(0.5, 0.99))
    generator, critic, generator_opt, critic_opt, loader = run.prepare(
        generator, critic, generator_opt, critic_opt, loader
    )

    for epoch in run.epochs():
        for i, (real,) in run.enumerate(loader):
            real = real.to(device)
            fake = generator(torch.randn(len(real), NOISE, device=device))
            if i % (args.n_critic + 1) < args.n_critic:
                critic_opt.zero_grad()
                d_loss = score(critic(real), 1.0) + score(critic(fake.detach()), 0.0)
                d_loss.backward()
                critic_opt.step()
            else:
                generator_opt.zero_grad()
                g_loss = score(critic(fake), 1.0)
                g_loss.backward()
                generator_opt.step()
        run.print(f"epoch {epoch}: losses {d_loss.item():.4f}, {g_loss.item():.4f}")

    if args.save and run.is_main:
        torch.save(generator.state_dict(), args.save)


if __name__ == "__main__":
    main()
