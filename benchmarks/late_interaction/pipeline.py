"""From strings to token vectors, and from a query to its ranking: fastbert's MultiVectorEncoder beside its peer.

    pip install sentence-transformers==6.2.0
    python benchmarks/late_interaction/pipeline.py --data ../shared/data --output benchmarks/results/<machine> \\
        --python onnx=ONNX/bin/python --python openvino=OPENVINO/bin/python

The peer is sentence-transformers' class of that name, with each of its backends. Two shapes with random weights:
answerai-colbert-small's and GTE-ModernColBERT's. Each contestant has a process of its own, and they take turns.
optimum wants an older transformers, so a backend may have an interpreter of its own: `--python NAME=PATH`.
The names are torch, onnx, openvino and fastbert. All compute with as many threads as torch takes by itself.

Texts: sentences of banking77, and paragraphs of XQuAD and of WikiText-2, sorted, the longest first. There are a few
groups of each corpus. A group's texts are neighbours in the order of lengths, as in a batch of a large sorted corpus.
So a peer pads little. It has the best of three batch sizes, and fastbert its own batches.
Search: a query of XQuAD beside 1,000 stored documents. They are copies of fewer paragraphs, since making them is slow.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from workers import OURS, SPECIAL, Worker, Workers, alive, answer_all, backend_options, interpreters, package_versions

# A peer's interpreter has no fastbert: only functions of this side and of our workers import it.

PEER = "sentence-transformers"
CONTESTANTS = {
    **{f"{PEER} {backend}": {"of": backend} for backend in ("torch", "onnx", "openvino")},
    **{f"{OURS} {dtype}": {"of": OURS, "dtype": dtype} for dtype in ("float32", "bfloat16", "int8")},
}
REFERENCE = f"{PEER} torch"
# Whose worker searches, and which documents it has.
SEARCHES = {
    **{name: (name, "float32") for name in CONTESTANTS if name.startswith(PEER)},
    f"{OURS} float32": (f"{OURS} float32", "float32"),
    f"{OURS} float32, int8 documents": (f"{OURS} float32", "int8"),
    f"{OURS} int8, int8 documents": (f"{OURS} int8", "int8"),
}
BATCH_SIZES = (8, 32, 64)
LARGEST_DIFFERENCE = 1e-3  # of float32 vectors from the reference's
CHECKED, WORDS, LONGEST = 8, 60, 300  # texts of a corpus, words of a paragraph, tokens
STORED, QUERIES, BLOCK, TOP = 1000, 200, 20, 10


@dataclass(frozen=True)
class Shape:
    """A model, and what keeps its passes short: groups of each corpus and their size, paragraphs that are stored."""

    config: str
    fields: dict[str, Any]
    dim: int
    transformer: dict[str, Any]
    inputs: tuple[str, ...]
    groups: dict[str, tuple[int, int]]
    paragraphs: int
    most_rounds: int


MODELS = {
    "answerai-colbert-small": Shape(
        "BertConfig",
        {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 1536},
        96,
        {"query_expansion": {"strategy": "fixed", "attend": False, "length": 32}, "document_length": LONGEST},
        ("input_ids", "token_type_ids", "attention_mask"),
        {"banking77": (4, 32), "XQuAD": (2, 8), "WikiText-2": (2, 8)},
        paragraphs=125,
        most_rounds=99,
    ),
    "GTE-ModernColBERT": Shape(
        "ModernBertConfig",
        {
            "vocab_size": 50368,
            "hidden_size": 768,
            "num_hidden_layers": 22,
            "num_attention_heads": 12,
            "intermediate_size": 1152,
            "local_attention": 128,
            "global_attn_every_n_layers": 3,
            **{"pad_token_id": 0, "cls_token_id": 101, "bos_token_id": 101, "sep_token_id": 102, "eos_token_id": 102},
        },
        128,
        {"query_length": 48, "document_length": LONGEST},
        ("input_ids", "attention_mask"),
        {"banking77": (2, 32), "XQuAD": (1, 8), "WikiText-2": (1, 8)},
        paragraphs=50,
        most_rounds=5,
    ),
}


# --------------------------------------------------------------------------------------------------------------------
# The folder of a model, and the texts


def write_folder(shape: Shape, vocabulary: Path, root: Path, layers: int | None) -> Path:
    """As sentence-transformers saves it."""
    import transformers
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
    from tokenizers import BertWordPieceTokenizer

    fields = shape.fields if layers is None else {**shape.fields, "num_hidden_layers": layers}
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(getattr(transformers, shape.config)(**fields))
    model.save_pretrained(root / "plain")
    words = BertWordPieceTokenizer(str(vocabulary), lowercase=True)._tokenizer
    inputs = list(shape.inputs)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_input_names=inputs, **SPECIAL)
    tokenizer.model_max_length = 512
    tokenizer.save_pretrained(root / "plain")
    modules = [
        Transformer(str(root / "plain"), **shape.transformer),
        Dense(fields["hidden_size"], shape.dim, False, torch.nn.Identity(), module_input_name="token_embeddings"),
        MultiVectorMask(skiplist_words=list(string.punctuation)),
        Normalize(module_input_name="token_embeddings"),
    ]
    MultiVectorEncoder(modules=modules, device="cpu").save_pretrained(str(root / "saved"))
    return root / "saved"


def read_texts(data: Path) -> tuple[dict[str, list[str]], list[str]]:
    """The corpora, and questions."""
    with (data / "banking77/banking77_test.csv").open(encoding="utf-8", newline="") as file:
        sentences = [row["text"] for row in csv.DictReader(file)]
    articles = json.loads((data / "qa/xquad.en.json").read_text(encoding="utf-8"))["data"]
    paragraphs = [each for article in articles for each in article["paragraphs"]]
    lines = (data / "lm/wikitext2.wiki.test.raw").read_text(encoding="utf-8").splitlines()
    corpora = {
        "banking77": sentences,
        "XQuAD": [each["context"] for each in paragraphs],
        "WikiText-2": [line.strip() for line in lines if len(line.split()) >= WORDS],
    }
    return corpora, [question["question"] for each in paragraphs for question in each["qas"]]


def spread(texts: list[str], groups: int, size: int, lengths: dict[str, int]) -> list[str]:
    """Groups of neighbours in the order of lengths, evenly over all of them, the longest first."""
    ordered = sorted(texts, key=lambda text: -lengths[text])
    step = len(ordered) / groups
    starts = [int((i + 0.5) * step - size / 2) for i in range(groups)]
    return [text for start in starts for text in ordered[start : start + size]]


def write_texts(shape: Shape, data: Path, root: Path, limit: int | None) -> dict[str, Any]:
    """texts.json for the workers. How many texts and tokens there are of each corpus, as they are cut."""
    from tokenizers import BertWordPieceTokenizer

    tokenizer = BertWordPieceTokenizer(str(data / "vocab/bert-base-uncased/vocab.txt"), lowercase=True)
    corpora, questions = read_texts(data)
    lengths = {text: min(LONGEST, len(tokenizer.encode(text).ids)) for texts in corpora.values() for text in texts}
    groups = shape.groups if limit is None else dict.fromkeys(corpora, (1, limit))
    chosen = {name: spread(texts, *groups[name], lengths) for name, texts in corpora.items()}
    count = QUERIES if limit is None else BLOCK
    every = {
        **chosen,
        "checked": [text for texts in chosen.values() for text in texts[:: max(1, len(texts) // CHECKED)]],
        "stored": spread(corpora["XQuAD"], limit or shape.paragraphs, 1, lengths),
        "queries": questions[:: len(questions) // count][:count],
    }
    (root / "texts.json").write_text(json.dumps(every), encoding="utf-8")
    return {name: {"texts": len(texts), "tokens": sum(map(lengths.get, texts))} for name, texts in chosen.items()}


# --------------------------------------------------------------------------------------------------------------------
# A worker: one contestant


class Contestant:
    """What a worker does when it is asked for it. All answers are mappings."""

    def __init__(self, task: dict[str, Any]):
        self.root, self.ours = Path(task["root"]), task["of"] == OURS
        self.backend = task["of"]
        self.texts = json.loads((self.root / "texts.json").read_text(encoding="utf-8"))
        self.stores: dict[str, Any] = {}
        if self.ours:
            import fastbert

            self.model: Any = fastbert.MultiVectorEncoder(task["folder"], dtype=task["dtype"], device="cpu")
        else:
            from sentence_transformers import MultiVectorEncoder

            options = backend_options(task["of"], task["threads"])
            options |= {} if task["of"] == "torch" else {"export": True}
            self.model = MultiVectorEncoder(task["folder"], device="cpu", backend=task["of"], model_kwargs=options)

    def versions(self) -> dict[str, Any]:
        return {"versions": package_versions(self.backend), "threads": torch.get_num_threads()}

    def vectors(self, corpus: str, batch_size: int | None) -> list[torch.Tensor]:
        options = {} if batch_size is None else {"batch_size": batch_size}
        found: list[torch.Tensor] = self.model.encode_document(self.texts[corpus], show_progress_bar=False, **options)
        return found

    def check(self, path: str) -> dict[str, Any]:
        """Write the vectors of a few documents and queries."""
        queries = self.model.encode_query(self.texts["queries"][:CHECKED], show_progress_bar=False)
        torch.save([each.float().clone() for each in [*self.vectors("checked", None), *queries]], path)
        return {}

    def encode(self, corpus: str, batch_size: int | None) -> dict[str, Any]:
        start = time.perf_counter()
        self.vectors(corpus, batch_size)
        return {"seconds": time.perf_counter() - start}

    def make_stored(self, path: str) -> dict[str, Any]:
        """Write what all of them search in."""
        found = self.model.encode_document(self.texts["stored"], output="packed")
        copies = max(1, STORED // len(found))
        torch.save(list(found) * copies, path)
        return {"documents": len(found) * copies, "vectors": len(found.vectors) * copies, "different": len(found)}

    def read_stored(self, path: str, precision: str) -> dict[str, Any]:
        rows = [each.clone() for each in torch.load(path)]
        if self.ours:
            from fastbert import TokenVectors

            stored = TokenVectors.of(rows)
            self.stores[precision] = stored.in_int8() if precision == "int8" else stored
            return {"form": precision}
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        present = torch.arange(padded.shape[1]) < torch.tensor([len(each) for each in rows])[:, None]
        forms: dict[str, Any] = {"a list": (rows, {}), "padded": (padded, {"b_mask": present})}
        seconds = {}
        for name, self.stores[precision] in forms.items():
            self.search(0, 2, precision)
            seconds[name] = min(self.search(0, 3, precision)["seconds"])
        best = min(seconds, key=seconds.__getitem__)
        self.stores[precision] = forms[best]
        return {"form": best}

    def search(self, first: int, last: int, precision: str) -> dict[str, Any]:
        """Seconds of each of these queries, and the best documents."""
        seconds, best, stored = [], [], self.stores[precision]
        for query in self.texts["queries"][first:last]:
            start = time.perf_counter()
            if self.ours:
                found = [each["corpus_id"] for each in self.model.rank(query, stored, TOP)]
            else:
                rows = self.model.encode_query(query, show_progress_bar=False)
                scores = self.model.similarity(rows, stored[0], **stored[1])[0]
                found = scores.topk(min(TOP, len(scores))).indices.tolist()
            seconds.append(time.perf_counter() - start)
            best.append(found[0])
        return {"seconds": seconds, "best": best}


# --------------------------------------------------------------------------------------------------------------------
# The contest


def compare(workers: Workers, root: Path) -> dict[str, dict[str, float]]:
    """How far each one's vectors are from the reference's. Float32 that is too far is not measured."""
    found = {}
    for name, worker in workers.items():
        path = root / f"{name}.pt"
        worker.ask("check", path=str(path))
        if worker.failure is None:
            found[name] = torch.load(path)
    result: dict[str, dict[str, float]] = {}
    for name, rows in found.items() if REFERENCE in found else ():
        pairs = [*zip(rows, found[REFERENCE], strict=True)]
        if any(a.shape != b.shape for a, b in pairs):
            workers[name].failure = f"its vectors have other shapes than those of {REFERENCE}"
            continue
        difference = max(float((a - b).abs().max()) for a, b in pairs)
        cosine = min(float(torch.cosine_similarity(a, b, dim=-1).min()) for a, b in pairs)
        result[name] = {"difference": difference, "cosine": cosine}
        if difference >= LARGEST_DIFFERENCE and not name.endswith(("bfloat16", "int8")):
            workers[name].failure = f"its vectors are {difference:.2g} away from those of {REFERENCE}"
    return result


def best_batch_size(name: str, worker: Worker, corpus: str, texts: int) -> int | None:
    """The one with the fastest pass. None is ours. Each has its first passes here, which are no part of its times."""
    sizes = [size for i, size in enumerate(BATCH_SIZES) if not i or BATCH_SIZES[i - 1] < texts]
    if name.startswith(OURS):
        worker.ask("encode", corpus=corpus, batch_size=None)
        return None
    tried = {size: worker.ask("encode", corpus=corpus, batch_size=size).get("seconds", 0.0) for size in sizes}
    return min(tried, key=tried.__getitem__)


def encode_in_turn(workers: Workers, corpus: str, size: dict[str, int], rounds: int) -> dict[str, Any]:
    """Of each contestant its batch size and its times of one corpus, and the best one's."""
    from fastbert.bench.timing import Timing

    batch_sizes = {
        name: best_batch_size(name, worker, corpus, size["texts"]) for name, worker in alive(workers).items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in batch_sizes}
    for _ in range(rounds):
        for name, worker in alive(workers).items():
            answer = worker.ask("encode", corpus=corpus, batch_size=batch_sizes[name])
            seconds[name] += [answer["seconds"]] if answer else []
    results = {}
    for name in alive(workers):
        timing = Timing.of(seconds[name])
        rates = {f"{what}_per_second": size[what] / timing.median for what in size}
        results[name] = {"batch_size": batch_sizes[name], **rates, "timing": timing.to_dict()}
    return {
        "corpus": corpus,
        "rounds": rounds,
        **size,
        "results": results,
        "best_peer": best_peer(results, "tokens_per_second", max),
    }


def best_peer(results: dict[str, Any], key: str, best: Callable[..., str]) -> str | None:
    peers = [name for name in results if name.startswith(PEER)]
    return best(peers, key=lambda name: results[name][key]) if peers else None


def search_in_turn(workers: Workers, root: Path, queries: int) -> dict[str, Any]:
    """Milliseconds from a query's string to its ranking."""
    path = str(root / "stored.pt")
    size = workers[f"{OURS} float32"].ask("make_stored", path=path)
    turns = {name: (workers[who], precision) for name, (who, precision) in SEARCHES.items()}
    forms: dict[str, str | None] = {}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    best: dict[str, list[int]] = {name: [] for name in turns}
    for name, (worker, precision) in turns.items():
        forms[name] = worker.ask("read_stored", path=path, precision=precision).get("form")
        worker.ask("search", first=0, last=3, precision=precision)
    for first in range(0, queries, BLOCK):
        for name, (worker, precision) in turns.items():
            answer = worker.ask("search", first=first, last=min(queries, first + BLOCK), precision=precision)
            seconds[name] += answer.get("seconds", [])
            best[name] += [i % size["different"] for i in answer.get("best", [])]
    results = {}
    for name in (name for name, (worker, _) in turns.items() if worker.failure is None):
        times = torch.tensor(seconds[name]) * 1e3
        same = statistics.mean(a == b for a, b in zip(best[name], best[f"{OURS} float32"], strict=True))
        quantiles = {"p50": float(times.quantile(0.5)), "p99": float(times.quantile(0.99))}
        results[name] = {"form": forms[name], **quantiles, "same_best": same}
    return {**size, "queries": queries, "results": results, "best_peer": best_peer(results, "p50", min)}


def measure(name: str, options: argparse.Namespace, pythons: dict[str, str]) -> dict[str, Any]:
    """All figures of one model."""
    shape = MODELS[name]
    with tempfile.TemporaryDirectory(prefix="late-interaction-") as path:
        root, workers = Path(path), {}
        sizes = write_texts(shape, options.data, root, options.texts)
        vocabulary = options.data / "vocab/bert-base-uncased/vocab.txt"
        folder = write_folder(shape, vocabulary, root, options.layers)
        queries = len(json.loads((root / "texts.json").read_text(encoding="utf-8"))["queries"])
        task = {"root": path, "folder": str(folder), "threads": torch.get_num_threads()}
        try:
            for contestant, which in CONTESTANTS.items():
                workers[contestant] = Worker(pythons[which["of"]], {**task, **which}, __file__)
                about = workers[contestant].ask("versions")
                print(f"{name}, {contestant}: {about or workers[contestant].failure}", flush=True)
            versions = {who: worker.ask("versions").get("versions") for who, worker in alive(workers).items()}
            agreement = compare(workers, root)
            if workers[f"{OURS} float32"].failure:
                sys.exit(f"{name}: {OURS} float32: {workers[f'{OURS} float32'].failure}")
            rows = []
            for corpus, size in sizes.items():
                rows.append(encode_in_turn(workers, corpus, size, min(options.rounds, shape.most_rounds)))
                rates = {who: round(each["tokens_per_second"]) for who, each in rows[-1]["results"].items()}
                print(f"{name}, {corpus}, tokens/s: {rates}", flush=True)
            search = search_in_turn(workers, root, queries)
            failures = {who: worker.failure for who, worker in workers.items() if worker.failure is not None}
        finally:
            for worker in workers.values():
                worker.close()
    found = {"versions": versions, "agreement": agreement, "corpora": rows, "search": search, "failures": failures}
    return {"model": name, **found}


# --------------------------------------------------------------------------------------------------------------------
# The page


def encoding_table(model: dict[str, Any]) -> list[str]:
    heads = [f"{row['corpus']}: {row['texts']} of {row['tokens'] / row['texts']:.0f}" for row in model["corpora"]]
    lines = [
        f"| {model['model']}, {model['corpora'][0]['rounds']} rounds | {' | '.join(heads)} |",
        "|---|" + "--:|" * len(heads),
    ]
    for name in CONTESTANTS:
        cells = []
        for row in model["corpora"]:
            result, best = row["results"].get(name), row["best_peer"]
            if result is None:
                cells.append("-")
                continue
            rates = f"{result['texts_per_second']:,.1f} / {result['tokens_per_second']:,.0f}"
            if not name.startswith(OURS):
                cells.append(f"{rates}, batch {result['batch_size']}")
            elif best is None:
                cells.append(f"**{rates}**")
            else:
                times = result["tokens_per_second"] / row["results"][best]["tokens_per_second"]
                cells.append(f"**{rates}** ({times:.2f}x)")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def search_table(models: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| | " + " | ".join(model["model"] for model in models) + " |",
        "|---|" + "--:|" * len(models),
    ]
    for name in SEARCHES:
        cells = []
        for search in (model["search"] for model in models):
            result, best = search["results"].get(name), search["best_peer"]
            if result is None:
                cells.append("-")
                continue
            cell = f"{result['p50']:.1f} / {result['p99']:.1f} ms"
            if not name.startswith(OURS):
                cell += f", {result['form']}"
            else:
                cell = f"**{cell}**" + (f" ({search['results'][best]['p50'] / result['p50']:.2f}x)" if best else "")
            cells.append(cell)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def notes(models: list[dict[str, Any]]) -> list[str]:
    """How far the vectors are from each other, the versions, and what is missing."""
    lines: list[str] = []
    for model in models:
        apart = [
            f"{name} {each['difference']:.1g} (cosine {each['cosine']:.5f})"
            for name, each in model["agreement"].items()
            if name != REFERENCE
        ]
        if apart:
            lines.append(f"- {model['model']}, largest difference from {REFERENCE}: {', '.join(apart)}.")
        same = [f"{name} {each['same_best']:.1%}" for name, each in model["search"]["results"].items()]
        lines.append(f"- {model['model']}, queries with the best document of {OURS} float32: {', '.join(same)}.")
    for name, versions in models[0]["versions"].items():
        if not name.startswith(OURS):
            lines.append(f"- {name}: {', '.join(f'{package} {version}' for package, version in versions.items())}.")
    for model in models:
        lines += [f"- {model['model']}, {name} is missing: {why}" for name, why in model["failures"].items()]
    return lines


def to_markdown(report: dict[str, Any]) -> str:
    from fastbert.bench.report import where

    models = report["models"]
    trial = [] if report["layers"] is None else [f"A trial with {report['layers']} layers: not to be cited.", ""]
    lines = [
        "# Late interaction, from strings",
        "",
        f"{where(report['machine'])} Rounds in turn, medians. Random weights.",
        "",
        *trial,
        "From strings to token vectors: texts/s / tokens/s. In a head: how many texts, and their tokens on average.",
        "In brackets: times the best peer. The peers compute in float32, with the best of the batch sizes"
        f" {', '.join(map(str, BATCH_SIZES))}.",
        "",
    ]
    for model in models:
        lines += encoding_table(model)
    sizes = [
        f"{model['search']['documents']:,} documents of {model['search']['vectors'] / model['search']['documents']:.0f}"
        f" vectors for {model['model']}"
        for model in models
    ]
    lines += [
        f"From a query's string to its ranking: p50 / p99 of {models[0]['search']['queries']} queries.",
        f"Stored are {', '.join(sizes)}. A peer has them as a list or padded, by what is faster.",
        "",
        *search_table(models),
        *notes(models),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="a folder with banking77/, qa/, lm/")
    parser.add_argument("--output", type=Path, help="a folder for late-interaction-pipeline.json and .md")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="may be given several times")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--texts", type=int, help="so many of each corpus and stored paragraphs: for a trial")
    parser.add_argument("--layers", type=int, help="so many layers, at least 2: for a trial")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return answer_all(Contestant, json.loads(options.worker))

    from fastbert.bench.compete import machine_of
    from fastbert.bench.report import write_report

    pythons = interpreters(options.python, {which["of"] for which in CONTESTANTS.values()})
    machine = machine_of(torch.get_num_threads(), ("transformers", "sentence_transformers"))
    report: dict[str, Any] = {"machine": machine, "rounds": options.rounds, "layers": options.layers}
    report["models"] = [measure(name, options, pythons) for name in options.models]
    print(to_markdown(report))
    if options.output is not None:
        write_report(options.output, "late-interaction-pipeline", report, to_markdown(report))
    return None


if __name__ == "__main__":
    main()
