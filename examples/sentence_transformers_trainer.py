"""Train sentence embeddings with sentence-transformers' trainer, over a model that fastbert has sped up.

python examples/sentence_transformers_trainer.py --model all-MiniLM-L6-v2 --train examples/data/pairs.jsonl
"""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

import fastbert
from fastbert.hub import resolve

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="all-MiniLM-L6-v2", help="a folder or a hub id")
    parser.add_argument("--train", default=str(HERE / "data/pairs.jsonl"), help="JSON lines: anchor, positive")
    parser.add_argument("--output", default="trained")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    rows = datasets.load_dataset("json", data_files=options.train, split="train")
    held_out, rows = rows.select(range(8)), rows.select(range(8, len(rows)))
    evaluator = InformationRetrievalEvaluator(
        queries=dict(enumerate(held_out["anchor"])),
        corpus=dict(enumerate(held_out["positive"])),
        relevant_docs={i: {i} for i in range(len(held_out))},
    )
    model = fastbert.accelerate(SentenceTransformer(str(resolve(options.model))))
    arguments = SentenceTransformerTrainingArguments(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=16,
        learning_rate=5e-5,
        logging_steps=5,
        report_to=[],
        save_strategy="no",
    )
    trainer = SentenceTransformerTrainer(
        model,
        arguments,
        rows,
        loss=MultipleNegativesRankingLoss(model),
        evaluator=evaluator,
        data_collator=fastbert.SentencePackingCollator(model),
    )
    trainer.train()
    print(f"accuracy@1 {evaluator(model)['cosine_accuracy@1']:.3f}")
    print(fastbert.status(model))
    model.save_pretrained(options.output)


if __name__ == "__main__":
    main()
