"""A Hugging Face token classifier: names in made-up sentences, padded to the longest of a batch."""

import argparse
import random

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForTokenClassification, get_linear_schedule_with_warmup

import samestep

WORDS, NAMES = range(1, 40), range(40, 60)


def sentences(count, seed):
    """Each name counts, with its label 1, and the word behind it, with its label 2."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        ids = [rng.choice(NAMES if rng.random() < 0.2 else WORDS) for _ in range(rng.randint(4, 12))]
        before = [0, *ids[:-1]]
        labels = [1 if word in NAMES else 2 if last in NAMES else 0 for word, last in zip(ids, before, strict=True)]
        made.append({"input_ids": ids, "labels": labels})
    return made


def collate(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(name, value):
        rows = [sample[name] + [value] * (longest - len(sample[name])) for sample in samples]
        return torch.tensor(rows)

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": padded("labels", -100)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", default="", help="folder for the trained model")
    args = parser.parse_args()
    run = samestep.start(epochs=args.epochs, seed=args.seed, name="token_classifier")
    device = run.device

    train_set, eval_set = sentences(96, seed=0), sentences(40, seed=1)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    eval_loader = DataLoader(eval_set, batch_size=args.batch_size, collate_fn=collate)
    config = BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    model = BertForTokenClassification(config).to(device)
    optimizer = AdamW(model.parameters(), lr=args.lr)
    steps = args.epochs * len(train_loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    model, optimizer, scheduler, train_loader, eval_loader = run.prepare(
        model, optimizer, scheduler, train_loader, eval_loader
    )

    for epoch in run.epochs():
        model.train()
        for batch in train_loader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss = run.backward(loss, mean_over=(batch["labels"] != -100).sum())
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            scheduler.step()

        model.eval()
        right = total = 0
        for batch in eval_loader:
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            labels = batch["labels"]
            right += (predictions == labels)[labels != -100].sum().item()
            total += (labels != -100).sum().item()
        right, total = run.reduce(right), run.reduce(total)
        run.print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {right / total:.4f}")

    if args.output and run.is_main:
        model.save_pretrained(args.output)


if __name__ == "__main__":
    main()
