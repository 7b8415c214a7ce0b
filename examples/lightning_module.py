"""Fine-tune a classifier with Lightning, over batches without padding: python examples/lightning_module.py"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import lightning
import torch
import transformers

import fastbert
from fastbert.hub import resolve

HERE = Path(__file__).parent


class Classifier(lightning.LightningModule):
    def __init__(self, name: str, num_labels: int):
        super().__init__()
        self.model = fastbert.AutoModelForSequenceClassification.from_pretrained(name, num_labels=num_labels)

    def training_step(self, batch: fastbert.PackedInputs, index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, batch_size=batch["batch"].batch_size, prog_bar=True)
        return loss

    def validation_step(self, batch: fastbert.PackedInputs, index: int) -> None:
        right = self.model(**batch).logits.argmax(-1) == batch["labels"]
        self.log("accuracy", right.float().mean(), batch_size=len(right), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    def on_train_start(self) -> None:
        self.model.train()  # Lightning leaves alone what from_pretrained has put into eval mode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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
    collate = fastbert.PackingCollator()
    loaders = [
        torch.utils.data.DataLoader([e for i, e in enumerate(examples) if i % 4], 16, shuffle=True, collate_fn=collate),
        torch.utils.data.DataLoader(examples[::4], 16, collate_fn=collate),
    ]
    lightning.seed_everything(0)
    module = Classifier(options.model, len(names))
    trainer = lightning.Trainer(max_epochs=options.epochs, logger=False, enable_checkpointing=False)
    trainer.fit(module, *loaders)
    print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})
    module.model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)


if __name__ == "__main__":
    main()
