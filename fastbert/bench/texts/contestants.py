"""Who makes vectors of texts: how each is loaded, and called for one text or for many.

A vector is the mean of the last hidden states of a text's tokens, of length 1. Each contestant is used as its own
documentation recommends; an exported model is run in a plain loop with `tokenizers` and NumPy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from fastbert.bench import contestants as batches
from fastbert.bench.contestants import FLOATS
from fastbert.bench.jobs import PRECISIONS, BenchJob
from fastbert.bench.runtimes import onnxruntime_file, onnxruntime_session, openvino_request, prepare_onnxruntime
from fastbert.bench.texts.folder import cutting_tokenizer
from fastbert.messages import absent, install

BATCH_SIZE = 32  # texts, where a contestant takes a number of them

Rows = Callable[[list[str]], Any]  # texts -> float32 (texts, hidden_size), in their order
Run = Callable[[np.ndarray, np.ndarray], np.ndarray]  # input_ids, attention_mask -> last hidden states


@dataclass(frozen=True)
class OneText:
    """Calls of one text, each of which gives its vector; `from_ids` takes int64 (1, tokens)."""

    from_string: Callable[[str], Any]
    from_ids: Callable[[np.ndarray], Any] | None = None


@dataclass(frozen=True)
class TextContestant:
    """`one(job, lengths)` is who is called with texts of so many tokens, `many(job)` with a corpus. None: it has no
    part in that mode. `prepare` is as a batch's contestant has it.
    """

    precisions: tuple[str, ...]
    packages: tuple[str, ...] = ()
    one: Callable[[BenchJob, Sequence[int]], OneText] | None = None
    has_ids: bool = True
    many: Callable[[BenchJob], Rows] | None = None
    prepare: Callable[[BenchJob], Any] | None = None
    how: str = install("bench")  # its packages are installed
    left_out: str | None = None  # why nothing here runs it

    def missing(self) -> str | None:
        """Why it cannot run on this machine; None when it can."""
        if self.left_out is not None:
            return self.left_out
        missing = absent(*self.packages)
        return f"not installed: {', '.join(missing)} ({self.how})" if missing else None


# --------------------------------------------------------------------------------------------------------------------
# Ours, and sentence-transformers


def _fastbert(job: BenchJob) -> Any:
    from fastbert.sentences import SentenceEncoder

    return SentenceEncoder(str(job.checkpoint), dtype=job.precision)


def _fastbert_one(job: BenchJob, lengths: Sequence[int]) -> OneText:
    encoder = _fastbert(job)

    def from_ids(ids: np.ndarray) -> torch.Tensor:
        hidden = encoder.model(torch.from_numpy(ids)).last_hidden_state
        return F.normalize(hidden.float().mean(1), dim=-1)[0]

    return OneText(encoder.encode, from_ids)


def _sentence_transformer(job: BenchJob, accelerated: bool = False, backend: str = "torch") -> Any:
    import sentence_transformers

    of_backend: Any = {"model_kwargs": {"dtype": job.precision}} if backend == "torch" else {"backend": backend}
    model = sentence_transformers.SentenceTransformer(str(job.checkpoint), device="cpu", **of_backend)
    if accelerated:
        from fastbert.acceleration import accelerate

        accelerate(model)
    return model


def _sentence_transformer_one(accelerated: bool, job: BenchJob, lengths: Sequence[int]) -> OneText:
    return OneText(partial(_sentence_transformer(job, accelerated).encode, show_progress_bar=False))


def _sentence_transformer_many(accelerated: bool, backend: str, job: BenchJob) -> Rows:
    model = _sentence_transformer(job, accelerated, backend)
    return partial(model.encode, batch_size=BATCH_SIZE, show_progress_bar=False)


# --------------------------------------------------------------------------------------------------------------------
# Exported models in a plain loop. Tokens are added up by a product with ones, and a sum has the mean's direction:
# numpy.mean takes 3 times as long along this axis, and adds one after the other, whose error in float32 fails the check
# at 512 tokens.


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _loop_one(open_runs: Callable[[BenchJob, Sequence[int]], Run], job: BenchJob, lengths: Sequence[int]) -> OneText:
    tokenizer, run = cutting_tokenizer(job.checkpoint), open_runs(job, lengths)
    masks = {length: np.ones((1, length), dtype=np.int64) for length in lengths}
    ones = {length: np.ones(length, dtype=np.float32) for length in lengths}

    def from_ids(ids: np.ndarray) -> np.ndarray:
        length = ids.shape[1]
        return _unit(ones[length] @ run(ids, masks[length])[0])

    return OneText(lambda text: from_ids(np.array([tokenizer.encode(text).ids], dtype=np.int64)), from_ids)


def _batches_of_tokens(tokenizer: Tokenizer, texts: list[str]) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Texts in batches of similar length, longest first: their places and their ids.

    All are tokenised first: a batch that is sorted by characters pads more.
    """
    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]), reverse=True)
    for start in range(0, len(order), BATCH_SIZE):
        places = order[start : start + BATCH_SIZE]
        yield places, [ids[i] for i in places]


def _mask_of(ids: list[list[int]]) -> np.ndarray:
    """Bool (texts, longest): True at real tokens."""
    lengths = np.array([len(of_text) for of_text in ids])
    return np.arange(lengths.max()) < lengths[:, None]


def _means(hidden: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(texts, longest, hidden_size) and (texts, longest) -> (texts, hidden_size), of length 1."""
    return _unit((mask[:, None].astype(np.float32) @ hidden)[:, 0])


def _loop_many(open_runs: Callable[[BenchJob, Sequence[int]], Run], job: BenchJob) -> Rows:
    tokenizer, run = cutting_tokenizer(job.checkpoint), open_runs(job, ())
    config = json.loads((job.checkpoint / "config.json").read_text(encoding="utf-8"))

    def rows(texts: list[str]) -> np.ndarray:
        vectors = np.empty((len(texts), config["hidden_size"]), dtype=np.float32)
        for places, ids in _batches_of_tokens(tokenizer, texts):
            mask = _mask_of(ids)
            padded = np.full(mask.shape, config["pad_token_id"], dtype=np.int64)
            padded[mask] = np.concatenate(ids)
            vectors[places] = _means(run(padded, mask.astype(np.int64)), mask)
        return vectors

    return rows


def _onnxruntime_runs(job: BenchJob, lengths: Sequence[int]) -> Run:
    session = onnxruntime_session(job)
    return lambda ids, mask: session.run(None, {"input_ids": ids, "attention_mask": mask})[0]


def _openvino_runs(variant: str, job: BenchJob, lengths: Sequence[int]) -> Run:
    """With lengths, one text of each and a compiled model for each; without, batches of any shape and padding."""
    requests = {length: openvino_request(variant, job, (1, length)) for length in lengths}
    whole = None if lengths else openvino_request(variant, job, None)

    def run(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        feed = {"input_ids": ids, "attention_mask": mask} if job.masked else {"input_ids": ids}
        request = whole or requests[ids.shape[1]]
        hidden: np.ndarray = request.infer(feed, share_inputs=True, share_outputs=True)[0]
        return hidden

    return run


# --------------------------------------------------------------------------------------------------------------------
# fastembed and CTranslate2


def _fastembed_folder(job: BenchJob) -> Path:
    return job.prepared / f"fastembed-{job.precision}"


def _prepare_fastembed(job: BenchJob) -> dict[str, Any]:
    """The file that ONNX Runtime's own contestant runs, with the tokenizer beside it."""
    prepare_onnxruntime(job)
    folder = _fastembed_folder(job)
    folder.mkdir(exist_ok=True)
    (folder / "model.onnx").symlink_to(onnxruntime_file(job).resolve())
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to((job.checkpoint / name).resolve())
    return {}


def _fastembed_many(job: BenchJob) -> Rows:
    """It takes texts in their order and tokenises them itself, so they come sorted by characters."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    name, config = "fastbert/bench", json.loads((job.checkpoint / "config.json").read_text(encoding="utf-8"))
    TextEmbedding.add_custom_model(
        name, PoolingType.MEAN, True, ModelSource(hf=name), config["hidden_size"], model_file="model.onnx"
    )
    model = TextEmbedding(name, specific_model_path=str(_fastembed_folder(job)), threads=job.threads)

    def rows(texts: list[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]), reverse=True)
        vectors = np.empty((len(texts), config["hidden_size"]), dtype=np.float32)
        vectors[order] = list(model.embed([texts[i] for i in order], batch_size=BATCH_SIZE))
        return vectors

    return rows


def _prepare_ctranslate2(job: BenchJob) -> dict[str, Any]:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(job.checkpoint)).convert(str(job.prepared / "ctranslate2"), force=True)
    return {}


def _ctranslate2_many(job: BenchJob) -> Rows:
    """It takes padding out of its batches by itself."""
    import ctranslate2

    encoder = ctranslate2.Encoder(
        str(job.prepared / "ctranslate2"),
        device="cpu",
        compute_type=job.precision,
        intra_threads=job.threads,
        inter_threads=1,
    )
    tokenizer = cutting_tokenizer(job.checkpoint)
    width = json.loads((job.checkpoint / "config.json").read_text(encoding="utf-8"))["hidden_size"]

    def rows(texts: list[str]) -> np.ndarray:
        vectors = np.empty((len(texts), width), dtype=np.float32)
        for places, ids in _batches_of_tokens(tokenizer, texts):
            hidden = encoder.forward_batch(ids).last_hidden_state.to(ctranslate2.DataType.float32)
            vectors[places] = _means(np.asarray(hidden), _mask_of(ids))
        return vectors

    return rows


# --------------------------------------------------------------------------------------------------------------------


def _loops(name: str, open_runs: Callable[[BenchJob, Sequence[int]], Run]) -> TextContestant:
    """With the preparation that the contestant of batches has."""
    contestant = batches.CONTESTANTS[name]
    return TextContestant(
        contestant.precisions,
        contestant.packages,
        partial(_loop_one, open_runs),
        many=partial(_loop_many, open_runs),
        prepare=contestant.prepare,
    )


def _sentence_transformers(accelerated: bool) -> TextContestant:
    return TextContestant(
        FLOATS,
        ("sentence_transformers",),
        partial(_sentence_transformer_one, accelerated),
        has_ids=False,
        many=partial(_sentence_transformer_many, accelerated, "torch"),
    )


def _backend(name: str, package: str, needs: str) -> TextContestant:
    """sentence-transformers with a model that optimum exports for it."""
    return TextContestant(
        ("float32",),
        ("sentence_transformers", "optimum"),
        many=partial(_sentence_transformer_many, False, name),
        how=f"pip install {package}, which needs {needs}",
    )


CONTESTANTS = {
    "fastbert": TextContestant(PRECISIONS, one=_fastbert_one, many=lambda job: _fastbert(job).encode),
    "fastbert-accelerate": _sentence_transformers(accelerated=True),  # inside of sentence-transformers
    "sentence-transformers": _sentence_transformers(accelerated=False),
    "sentence-transformers-onnx": _backend("onnx", "optimum-onnx", "transformers below 4.58"),
    "sentence-transformers-openvino": _backend("openvino", "optimum-intel", "transformers below 5.6"),
    "onnxruntime": _loops("onnxruntime", _onnxruntime_runs),
    "openvino": _loops("openvino", partial(_openvino_runs, "float")),
    "openvino-weights": _loops("openvino-weights", partial(_openvino_runs, "weights")),
    "openvino-calibrated": _loops("openvino-calibrated", partial(_openvino_runs, "calibrated")),
    "ctranslate2": TextContestant(
        PRECISIONS, ("ctranslate2", "transformers"), many=_ctranslate2_many, prepare=_prepare_ctranslate2
    ),
    "fastembed": TextContestant(
        ("float32", "int8"),
        ("fastembed", "onnxruntime", "onnx", "transformers"),
        many=_fastembed_many,
        prepare=_prepare_fastembed,
        how="pip install fastembed, which needs huggingface_hub below 2",
    ),
    "llama.cpp": TextContestant(
        PRECISIONS, left_out="it needs the model as GGUF, which only the scripts of llama.cpp's own checkout write"
    ),
}


def latency_contestants() -> tuple[str, ...]:
    return tuple(name for name, contestant in CONTESTANTS.items() if contestant.one is not None)


def corpus_contestants() -> tuple[str, ...]:
    return tuple(name for name, contestant in CONTESTANTS.items() if contestant.many or contestant.left_out)
