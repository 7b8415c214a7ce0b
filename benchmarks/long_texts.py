"""Texts longer than the model: `python -m benchmarks.long_texts --output benchmarks/results/<machine>`.

all-MiniLM-L6-v2. Chunks of a text beside the same chunks given as texts, and the time of texts of 5,000 to 100,000
words, in one process, in turn; medians. What a text costs that is cut to 512 tokens, of 512 words and of 500,000.
The highest memory of 10,000 and of 1,000,000 words, in a process each, of `fastbert search --windows`, too.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import fastbert
from benchmarks.inspecting.models import in_turn
from fastbert import Windows
from fastbert.bench.report import write_report
from fastbert.bench.timing import describe_machine, peak_memory
from fastbert.cli import main as main_of_cli

MODEL = "all-MiniLM-L6-v2"
WORDS = (5_000, 10_000, 20_000, 100_000)
MANY, FEW = 1_000_000, 10_000
KEPT, CUT = 512, (512, 500_000)  # tokens that are kept, and words of which they are
CALLS = ("encode", "encode_chunks")
SEARCH = "search"  # `fastbert search --windows` over one text
SENTENCES = Path(__file__).parents[1] / "examples" / "sentences.txt"


def text_of(words: int) -> str:
    """Sentences in any order, again and again."""
    sentences, draw = SENTENCES.read_text(encoding="utf-8").splitlines(), random.Random(0)
    found: list[str] = []
    while len(found) < words:
        found += draw.choice(sentences).split()
    return " ".join(found[:words])


def run(encoder: fastbert.SentenceEncoder, call: str, text: str) -> Any:
    return encoder.encode(text, windows=Windows()) if call == "encode" else encoder.encode_chunks(text)


def memory_of(call: str, words: int, threads: int) -> dict[str, float]:
    """In a process of its own."""
    torch.set_num_threads(threads)
    if call == SEARCH:
        return search(text_of(words))
    encoder, text = fastbert.SentenceEncoder(MODEL, dtype="bfloat16", device="cpu"), text_of(words)
    start = time.perf_counter()
    run(encoder, call, text)
    return {"seconds": time.perf_counter() - start, "bytes": peak_memory()}


def search(text: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path, found = Path(folder, "text.jsonl"), Path(folder, "found.jsonl")
        path.write_text(json.dumps({"text": text}), encoding="utf-8")
        arguments = ["search", "where do cats sleep?", str(path), "--column", "text", "--model", MODEL, "--windows"]
        start = time.perf_counter()
        code = main_of_cli([*arguments, "--dtype", "bfloat16", "--device", "cpu", "--output", str(found)])
        seconds = time.perf_counter() - start
        if code or not found.read_text(encoding="utf-8"):
            raise SystemExit(f"fastbert search ended with {code}")
    return {"seconds": seconds, "bytes": peak_memory()}


def times(rounds: int) -> dict[str, Any]:
    encoder = fastbert.SentenceEncoder(MODEL, device="cpu")
    texts = {words: text_of(words) for words in WORDS}
    text = texts[20_000]
    chunks = encoder.encode_chunks(text)
    parts = [text[a:b] for a, b in zip(chunks.starts, chunks.ends, strict=True)]
    beside = in_turn({"chunks": lambda: encoder.encode_chunks(text), "texts": lambda: encoder.encode(parts)}, rounds)
    calls = {
        f"{call} {words}": lambda call=call, text=text: run(encoder, call, text)
        for call in CALLS
        for words, text in texts.items()
    }
    by_words = in_turn(calls, rounds)
    encoder.max_seq_length = KEPT
    long = {words: text_of(words) for words in CUT}
    cut = {str(words): lambda text=text: encoder.encode([text]) for words, text in long.items()}
    return {"beside": beside, "chunks": len(parts), "by words": by_words, "cut": in_turn(cut, 5 * rounds)}


def to_markdown(report: dict[str, Any]) -> str:
    machine, found, memory = report["machine"], report["times"], report["memory"]
    beside, by_words, cut = found["beside"], found["by words"], [1e3 * found["cut"][str(words)] for words in CUT]
    lines = [
        f"{machine['cpu']}, {report['threads']} threads, torch {machine['torch']}, commit {machine['commit']},"
        f" {machine['date']}; {MODEL}; medians of {report['rounds']} rounds in turn.",
        "",
        f"{found['chunks']} chunks of a text of 20,000 words: {beside['chunks']:.2f} s; given as texts"
        f" {beside['texts']:.2f} s ({beside['texts'] / beside['chunks']:.3f} times the rate), float32.",
        "",
        f"Cut to {KEPT} tokens: {CUT[0]} words {cut[0]:.1f} ms, {CUT[1]:,} words {cut[1]:.1f} ms.",
        "",
        "| words | " + " | ".join(f"{call}, s | us a word" for call in CALLS) + " |",
        "|--:|" + "--:|--:|" * len(CALLS),
    ]
    for words in WORDS:
        cells = [by_words[f"{call} {words}"] for call in CALLS]
        lines.append(f"| {words:,} | " + " | ".join(f"{s:.2f} | {1e6 * s / words:.0f}" for s in cells) + " |")
    lines += ["", "The highest resident memory, bfloat16:", "", "| | words | s | MB |", "|---|--:|--:|--:|"]
    lines += [
        f"| {row['call']} | {row['words']:,} | {row['seconds']:.1f} | {row['bytes'] / 1e6:.0f} |" for row in memory
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="a folder for long_texts.json and long_texts.md")
    parser.add_argument("--memory-of", nargs=2, metavar=("CALL", "WORDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of is not None:
        call, words = options.memory_of
        print(json.dumps(memory_of(call, int(words), options.threads)))
        return
    memory = []
    for call in (*CALLS, SEARCH):
        for words in (FEW, MANY):
            command = [sys.executable, "-m", "benchmarks.long_texts", "--threads", str(options.threads)]
            command += ["--memory-of", call, str(words)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            memory.append({"call": call, "words": words, **json.loads(done.stdout)})
    torch.set_num_threads(options.threads)
    report = {"machine": describe_machine(), "rounds": options.rounds, "threads": options.threads, "memory": memory}
    report["times"] = times(options.rounds)
    print(to_markdown(report))
    if options.output is not None:
        write_report(options.output, "long_texts", report, to_markdown(report))


if __name__ == "__main__":
    main()
