"""Contestants in processes of their own, for the benchmarks beside sentence-transformers' backends.

optimum wants an older transformers, so a process may have an interpreter of its own, which has no fastbert. Only
functions of the asking side import it. A worker gets a line of JSON for each question and answers with one.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[1]
OURS = "fastbert"  # the name of our own interpreter
PACKAGES = ("sentence-transformers", "transformers", "torch")  # whose versions a worker tells, beside its backend's
BACKEND_PACKAGES = {"onnx": ("onnxruntime", "optimum-onnx"), "openvino": ("openvino", "optimum-intel")}
# Of BERT's tokenizer, which all shapes have.
SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}


def write_encoder(kind: str, fields: dict[str, Any], pooling: str, longest: int, vocabulary: Path, root: Path) -> Path:
    """A model with random weights and BERT's tokenizer, as sentence-transformers saves it.

    kind: the name of its config in transformers. longest: in tokens.
    """
    import torch
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from tokenizers import BertWordPieceTokenizer

    torch.manual_seed(0)
    transformers.AutoModel.from_config(getattr(transformers, kind)(**fields)).save_pretrained(root / "plain")
    words = BertWordPieceTokenizer(str(vocabulary), lowercase=True)._tokenizer
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL)
    tokenizer.model_max_length = longest
    tokenizer.save_pretrained(root / "plain")
    modules = [Transformer(str(root / "plain")), Pooling(fields["hidden_size"], pooling), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(root / "saved"))
    return root / "saved"


def package_versions(backend: str) -> dict[str, str]:
    """Of a worker's packages."""
    return {name: importlib.metadata.version(name) for name in PACKAGES + BACKEND_PACKAGES.get(backend, ())}


def backend_options(backend: str, threads: int) -> dict[str, Any]:
    """model_kwargs of sentence-transformers: so many threads, and float32.

    Where the processor has bfloat16, OpenVINO would compute in it.
    """
    if backend == "onnx":
        import onnxruntime

        session = onnxruntime.SessionOptions()
        session.intra_op_num_threads = threads
        return {"provider": "CPUExecutionProvider", "session_options": session}
    if backend == "openvino":
        return {"ov_config": {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}}
    return {}


def first_line(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What the page says of a worker that died, as the last line of stderr."""
    sys.__excepthook__(error_type, error, trace)
    lines = str(error).strip().splitlines() or [""]
    print(f"{error_type.__name__}: {textwrap.shorten(lines[0], 160, placeholder=' ...')}", file=sys.stderr, flush=True)


def answer_all(kind: type, task: dict[str, Any]) -> None:
    """The worker's side. Each question names a method of kind(task), which returns a mapping.

    Libraries write to stdout, too: all but answers goes to stderr.
    """
    sys.excepthook = first_line
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    contestant = kind(task)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(contestant, request.pop("do"))(**request)
        stdout.write(json.dumps(answer) + "\n")
        stdout.flush()


class Worker:
    """The process of a contestant, and what is asked of it.

    task: what `program --worker` gets as JSON. "of" names the interpreter and "threads" how many it computes with.
    """

    def __init__(self, python: str, task: dict[str, Any], program: str):
        from fastbert.bench.compete import THREAD_VARIABLES

        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (close() does)
        self.failure: str | None = None
        own = {"PYTHONPATH": str(ROOT)} if task["of"] == OURS else {}
        self.process = subprocess.Popen(
            [python, program, "--worker", json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, **own, **{name: str(task["threads"]) for name in THREAD_VARIABLES}},
        )

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Its answer. Empty once it has died, and `failure` says of what."""
        from fastbert.bench.compete import SETTLE_SECONDS

        assert self.process.stdin is not None and self.process.stdout is not None
        if self.failure is not None:
            return {}
        time.sleep(SETTLE_SECONDS)
        try:
            self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # its log says of what it died
        line = self.process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = self.process.wait()
        self.log.seek(0)
        lines = [f"died with exit code {code}", *self.log.read().strip().splitlines()]
        self.failure = lines[-1] if code > 0 else f"killed by signal {-code}"
        return {}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # what a dead worker was asked last
                    stream.close()


Workers = dict[str, Worker]


def alive(workers: Workers) -> Workers:
    return {name: worker for name, worker in workers.items() if worker.failure is None}


def interpreters(given: list[str], names: Iterable[str]) -> dict[str, str]:
    """Of each name. Whatever is not given as NAME=PATH has this one."""
    pythons = dict.fromkeys(names, sys.executable)
    for each in given:
        name, _, path = each.partition("=")
        if name not in pythons or not Path(path).is_file():
            sys.exit(f"--python {each}: NAME=PATH is wanted, a name of {', '.join(pythons)} and an interpreter")
        pythons[name] = path
    return pythons
