"""Fine-tune a classifier in a loop of your own with Hugging Face Accelerate, over batches without padding.

python examples/accelerate_loop.py, or on several processes: accelerate launch examples/accelerate_loop.py
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator

import fastbert
from fastbert.hub import resolve

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="all-MiniLM-L6-v2", help="a folder or a hub id")
    parser.add_argument("--train", default=str(HERE / "data/intents.csv"), help="a CSV file: text, label")
    parser.add_argument("--output", default="trained")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    with open(options.train, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = sorted({row["label"] for row in rows})
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve(options.model))
    examples = [
        {**tokenizer(row["text"], truncation=True, max_length=128), "labels": names.index(row["label"])} for row in rows
    ]
    train, held_out = [e for i, e in enumerate(examples) if i % 4], examples[::4]

    torch.manual_seed(0)
    accelerator = Accelerator()
    model = fastbert.AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=len(names)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    collate = fastbert.PackingCollator()
    loaders = [
        torch.utils.data.DataLoader(train, batch_size=16, shuffle=True, collate_fn=collate),
        torch.utils.data.DataLoader(held_out, batch_size=16, collate_fn=collate),
    ]
    model, optimizer, train_loader, eval_loader = accelerator.prepare(model, optimizer, *loaders)
    for epoch in range(options.epochs):
        for batch in train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right = []
        with torch.inference_mode():
            for batch in eval_loader:
                outputs = (model(**batch).logits.argmax(-1), batch["labels"])
                logits, labels = accelerator.gather_for_metrics(outputs)
                right.append(logits == labels)
        model.train()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {torch.cat(right).float().mean():.3f}")
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(options.output)
        tokenizer.save_pretrained(options.output)


if __name__ == "__main__":
    main()
