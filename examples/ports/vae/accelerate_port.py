"""A variational autoencoder of scikit-learn's digits."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, random_split


class VAE(nn.Module):
    def __init__(self, hidden=32, latent=4):
        super().__init__()
        self.fc1 = nn.Linear(64, hidden)
        self.fc21 = nn.Linear(hidden, latent)
        self.fc22 = nn.Linear(hidden, latent)
        self.fc3 = nn.Linear(latent, hidden)
        self.fc4 = nn.Linear(hidden, 64)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decode(z), mu, logvar


def loss_function(recon, x, mu, logvar):
    """Reconstruction and KL divergence, summed over the samples."""
    bce = F.binary_cross_entropy(recon, x, reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", default="", help="file for images drawn from the model")
    args = parser.parse_args()
    set_seed(args.seed)
    accelerator = Accelerator()

    images = torch.tensor(load_digits().data[:800], dtype=torch.float32) / 16
    train_set, test_set = random_split(images, [640, 160], torch.Generator().manual_seed(0))
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=args.batch_size)
    model = VAE()
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)

    for epoch in range(args.epochs):
        model.train()
        train_loss = 0
        for data in train_loader:
            optimizer.zero_grad()
            recon, mu, logvar = model(data)
            loss = loss_function(recon, data, mu, logvar) / len(data)
            accelerator.backward(loss)
            optimizer.step()
            train_loss += accelerator.reduce(loss, "mean").item()
        accelerator.print(f"epoch {epoch}: train loss {train_loss / len(train_loader):.4f}")

        model.eval()
        test_loss = 0
        with torch.no_grad():
            for data in test_loader:
                recon, mu, logvar = model(data)
                recon, mu, logvar, data = accelerator.gather_for_metrics((recon, mu, logvar, data))
                test_loss += loss_function(recon, data, mu, logvar).item()
        accelerator.print(f"epoch {epoch}: test loss {test_loss / len(test_set):.4f}")

    if args.samples:
        drawn = accelerator.unwrap_model(model).decode(torch.randn(16, 4, device=accelerator.device))
        accelerator.save(drawn.cpu(), args.samples)


if __name__ == "__main__":
    main()
