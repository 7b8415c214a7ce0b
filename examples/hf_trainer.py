"""Fine-tune a classifier with the Hugging Face Trainer, over batches without padding.

python examples/hf_trainer.py --model all-MiniLM-L6-v2 --train examples/data/intents.csv
"""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets
import numpy as np
import transformers

import fastbert
from fastbert.hub import resolve

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="all-MiniLM-L6-v2", help="a folder or a hub id")
    parser.add_argument("--train", default=str(HERE / "data/intents.csv"), help="a CSV file: text, label")
    parser.add_argument("--output", default="trained")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    rows = datasets.load_dataset("csv", data_files=options.train, split="train").class_encode_column("label")
    names = rows.features["label"].names
    model = fastbert.AutoModelForSequenceClassification.from_pretrained(
        options.model,
        num_labels=len(names),
        id2label=dict(enumerate(names)),
        label2id={n: i for i, n in enumerate(names)},
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve(options.model))
    rows = rows.map(lambda batch: tokenizer(batch["text"], truncation=True, max_length=128), batched=True)
    split = rows.train_test_split(0.25, seed=0, stratify_by_column="label")

    def metrics(prediction: transformers.EvalPrediction) -> dict[str, float]:
        return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}

    arguments = transformers.TrainingArguments(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=16,
        learning_rate=1e-4,
        logging_steps=5,
        report_to=[],
        save_strategy="no",
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        data_collator=fastbert.PackingCollator(),
        compute_metrics=metrics,
    )
    trainer.train()
    print(trainer.evaluate())
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)


if __name__ == "__main__":
    main()
