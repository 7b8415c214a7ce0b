"""sentence-transformers' own tests of models, losses and trainers on four routes.

    git clone --branch v6.2.0 https://github.com/huggingface/sentence-transformers
    python tests/ecosystem/theirs_sentences.py FOLDER                     # the clone: the distribution has no tests
    python tests/ecosystem/theirs_sentences.py FOLDER tests/cross_encoder # some of them

Routes: the library as it is ("plain"), every model of transformers in it accelerated before its first call
("accelerated"), our classes in the place of transformers' ("own"), and `SentenceEncoder.as_sentence_transformer()` in
the place of SentenceTransformer ("wrapped"). How many calls ran packed is printed, and what
fails on a route and not on "plain"; the exit status is 1 where REASONS does not say why.

There is no hub: the models that the tests name are tiny ones with random weights in a cache of the hub's form, and its
data set is random sentences. Tests that want others fail on every route.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROUTES = ("plain", "accelerated", "own", "wrapped")
TESTS = ("tests/sentence_transformer", "tests/cross_encoder", "tests/sparse_encoder", "tests/multi_vector_encoder")
TESTS = (*TESTS, "tests/base/test_trainer.py", "tests/base/modules/test_transformer.py")
ENCODERS = (
    "sentence-transformers-testing/stsb-bert-tiny-safetensors",
    "google-bert/bert-base-uncased",
    "prajjwal1/bert-tiny",
    "distilbert/distilbert-base-uncased",
)
RERANKERS = ("cross-encoder-testing/reranker-bert-tiny-gooaq-bce",)
NOUNS = ("man", "guitar", "field", "dog", "train", "river", "book", "house", "street", "child")
VOCABULARY = 30522
SPARSE = ("sparse-encoder-testing/splade-bert-tiny-nq",)
# What the name or message of a failure has in it -> why that may be, of routes whose model is of our classes.
REASONS = {
    "dropout is still active": "the test turns nn.Dropout off; there are no such modules",
    "the model has no active dropout": "the same",
    "test_losses_match_in_train_mode_with_dropout_zeroed": "the test turns nn.Dropout off",
    "isinstance(BertModel(": "the test asks for transformers' own BertModel",
    "cannot be deleted from an EncoderConfig": "the test takes hidden_size away from the config",
    "an empty batch": "a batch without sequences is an error",
    "test_warn_on_unsupported_attention_config": "the test looks for flags of decoders on the config",
    "Regex pattern did not match": "an argument that is not known is an error of another text",
    "takes no foo": "an argument that is not known is an error; transformers ignores it",
    # of "wrapped" alone
    "test_load_with_model_kwargs": "the test looks at what their Transformer was given; ours was loaded before",
    "test_save_load_produces_same_output": "transformers' model reads the folder: other bits",
    "test_save_and_load_roundtrip": "transformers' model reads the folder: other values in rows of padding",
    "test_metrics_are_independent_of_corpus_chunk_size": "the same text may differ in its last bit within a batch",
}


# ----------------------------------------------------------------------------------------------------------------------
# A cache of the hub's form


def words() -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-"
    read = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    # A test sorts what SPLADE finds by weight and word: an id without a word is no word to sort by.
    return [*read, *(f"[unused{i}]" for i in range(VOCABULARY - len(read)))]


def write_models(cache: Path) -> None:
    import torch
    import transformers
    from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    torch.manual_seed(0)
    vocabulary = {word: place for place, word in enumerate(words())}
    tokenizer = transformers.BertTokenizer(vocab=vocabulary, model_max_length=512)
    size = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    with tempfile.TemporaryDirectory() as folder:

        def bare(kind: Any, **fields: Any) -> str:
            kind(transformers.BertConfig(vocab_size=VOCABULARY, **size, **fields)).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            return folder

        def sentences() -> Any:
            body = Transformer(bare(transformers.BertModel))
            return SentenceTransformer(modules=[body, Pooling(body.get_embedding_dimension())])

        def sparse() -> Any:
            body = Transformer(bare(transformers.BertForMaskedLM), transformer_task="fill-mask")
            return SparseEncoder(modules=[body, SpladePooling(pooling_strategy="max")])

        def reranker() -> Any:
            return CrossEncoder(bare(transformers.BertForSequenceClassification, num_labels=1))

        for names, make in ((ENCODERS, sentences), (RERANKERS, reranker), (SPARSE, sparse)):
            for name in names:
                place = cache / f"models--{name.replace('/', '--')}"
                snapshot = place / "snapshots" / ("0" * 40)
                snapshot.mkdir(parents=True)
                (place / "refs").mkdir()
                (place / "refs" / "main").write_text("0" * 40)
                make().save_pretrained(str(snapshot))


def sentences_of_stsb(name: str, *args: Any, split: str | None = None, **kwargs: Any) -> Any:
    """In the place of datasets.load_dataset."""
    import random

    from datasets import Dataset, DatasetDict

    if name != "sentence-transformers/stsb":
        raise ConnectionError(f"no {name} without a hub")
    draw = random.Random(0)

    def part(rows: int) -> Dataset:
        said = [" ".join(draw.choices(NOUNS, k=8)) for _ in range(2 * rows)]
        scores = [draw.random() for _ in range(rows)]
        return Dataset.from_dict({"sentence1": said[:rows], "sentence2": said[rows:], "score": scores})

    parts = DatasetDict(train=part(400), validation=part(100), test=part(100))
    return parts if split is None else parts[split.partition("[")[0]]


# ----------------------------------------------------------------------------------------------------------------------
# The plugin: `pytest -p theirs_sentences` with THEIRS_ROUTE and THEIRS_CALLS


def pytest_load_initial_conftests() -> None:
    """Before the conftests, which take the function by its name."""
    import datasets

    datasets.load_dataset = sentences_of_stsb


def pytest_configure(config: Any) -> None:
    import transformers

    import fastbert

    route = os.environ["THEIRS_ROUTE"]
    if route == "own":
        for auto in ("AutoModel", "AutoModelForSequenceClassification", "AutoModelForMaskedLM"):
            theirs, ours = getattr(transformers, auto), getattr(fastbert, auto)
            theirs.from_pretrained = staticmethod(_ours_or(theirs.from_pretrained, ours.from_pretrained))
    elif route == "accelerated":
        config._met = _accelerate_all()
    elif route == "wrapped":
        config._met = _wrap_all()


def pytest_unconfigure(config: Any) -> None:
    import fastbert

    calls: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for module in vars(config).get("_met", []):
        status = fastbert.status(module)
        calls["packed"] += status.packed
        calls["others"] += status.others
        reasons.update(str(status.why_not).splitlines())
    Path(os.environ["THEIRS_CALLS"]).write_text(json.dumps({"calls": calls, "reasons": reasons}))


def _ours_or(theirs: Any, ours: Any) -> Any:
    def from_pretrained(name: str, *args: Any, **kwargs: Any) -> Any:
        model = theirs(name, *args, **kwargs)
        if model.config.model_type != "bert":
            return model
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            own = ours(folder, dtype=model.dtype)
        own.config.name_or_path = name  # not the folder's, which is gone
        return own

    return from_pretrained


def _accelerate_all() -> list[Any]:
    import torch
    import transformers

    import fastbert

    call, met = torch.nn.Module.__call__, []

    def accelerates(module: Any, *args: Any, **kwargs: Any) -> Any:
        if "_met" not in module.__dict__:  # not only transformers' own: the library calls some by `forward`
            module.__dict__["_met"] = True
            if any(isinstance(child, transformers.PreTrainedModel) for child in module.modules()):
                for child in module.modules():
                    child.__dict__["_met"] = True
                with contextlib.suppress(ValueError):  # nothing in it that we know
                    met.append(fastbert.accelerate(module))
        return call(module, *args, **kwargs)

    torch.nn.Module.__call__ = accelerates
    return met


def _wrap_all() -> list[Any]:
    """A SentenceTransformer that is made from a name is one of ours, where a SentenceEncoder reads the name."""
    from sentence_transformers import SentenceTransformer

    import fastbert
    from fastbert.sentences.sentence_transformers import _class

    met: list[Any] = []

    class Wrapped(_class()):  # type: ignore[misc]
        def __init__(self, name: Any = None, **options: Any):
            try:
                encoder = fastbert.SentenceEncoder(name, **options) if isinstance(name, str) else None
            except (fastbert.ConfigError, fastbert.CheckpointError, TypeError):
                encoder = None
            if encoder is None:
                self.__class__ = SentenceTransformer
                self.__init__(name, **options)
                return
            super().__init__(encoder)
            self.model_card_data.set_base_model(name)
            met.append(self)

    Wrapped.__name__ = "SentenceTransformer"  # which model cards have

    def made(cls: Any, *args: Any, **options: Any) -> Any:
        return object.__new__(Wrapped if cls is SentenceTransformer else cls)

    SentenceTransformer.__new__ = made
    return met


# ----------------------------------------------------------------------------------------------------------------------


def run(folder: Path, tests: list[str], route: str, cache: Path, work: Path) -> tuple[dict[str, str], dict[str, Any]]:
    junit, calls = work / f"{route}.xml", work / f"{route}.json"
    environment = os.environ | {
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
        "THEIRS_ROUTE": route,
        "THEIRS_CALLS": str(calls),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "theirs_sentences",
        "-p",
        "no:cacheprovider",
        f"--junitxml={junit}",
    ]
    subprocess.run([*command, *tests], cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    found = {}
    for case in ET.parse(junit).iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error")), None)
        what = "skipped" if case.find("skipped") is not None else "passed"
        found[f"{case.get('classname')}::{case.get('name')}"] = what if bad is None else f"{bad.get('message')}"
    return found, json.loads(calls.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("tests", nargs="*", default=TESTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder, "hub")
        write_models(cache)
        plain: dict[str, str] = {}
        unknown = 0
        for route in ROUTES:
            found, said = run(options.folder, list(options.tests), route, cache, Path(folder))
            plain = plain or found
            counts = Counter(what if what in ("passed", "skipped") else "failed" for what in found.values())
            line = ", ".join(f"{counts[what]} {what}" for what in ("passed", "failed", "skipped"))
            print(f"{route:12} {line} {said or ''}", flush=True)
            for test, what in found.items():
                if what in ("passed", "skipped") or plain.get(test) not in ("passed", "skipped"):
                    continue
                reasons = REASONS if route in ("own", "wrapped") else {}
                why = next((why for part, why in reasons.items() if part in f"{test}: {what}"), None)
                unknown += why is None
                print(f"    {test}: {why or repr(what[:200])}")
    return min(unknown, 1)


if __name__ == "__main__":
    sys.exit(main())
