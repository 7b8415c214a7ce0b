"""A process of `fastbert bench`. It gets one task as JSON, and answers in lines of JSON on stdout.

A contestant answers once when its output has passed the check. Then it answers each line on stdin with one timing.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from fastbert.bench import ceiling, fine_tuning
from fastbert.bench.contestants import CONTESTANTS
from fastbert.bench.jobs import BenchJob, fields_without_type, load_peer
from fastbert.bench.timing import measure_once, peak_memory
from fastbert.testing.cases import MODELS, WORKLOADS, Workload
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

CHECKED_SEQUENCES = 4  # float64 is slow: the outputs of the first few sequences are checked
LONGEST_LITERAL = 2048
LOWEST_COSINE = 0.98  # what int8 must reach; ONNX Runtime's and OpenVINO's int8 have 0.9994 and more on BERT-base
TURN_SECONDS = 0.2  # a turn is as many calls as fill this, at least one

Answer = Callable[[dict[str, Any]], None]


def write_checkpoint(model: str, checkpoint: Path) -> None:
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    fields = MODELS[model]
    config = AutoConfig.for_model(fields.get("model_type", "bert"), **fields_without_type(fields))
    AutoModel.from_config(config).save_pretrained(checkpoint)


def write_reference(model_name: str, checkpoint: Path, workload: Workload, path: Path) -> None:
    """The oracle, transformers' literal formulas in float64, and the same in the dtypes, of the checked sequences."""
    input_ids, mask = (t[:CHECKED_SEQUENCES] for t in workload.batch())
    expected = {}
    with torch.inference_mode():
        for name in ("float64", "float32", "bfloat16"):
            # Literal attention holds all scores of a layer, in float64 6 GB at 8192 tokens; and ModernBERT's gives NaN
            # there where there is padding: its softmax is float32, whose range a float64 mask exceeds.
            literal = MODELS[model_name].get("model_type", "bert") == "bert" and input_ids.shape[1] <= LONGEST_LITERAL
            attention = "eager" if literal else "sdpa"
            model = load_peer(checkpoint, getattr(torch, name), attention)
            out = model(input_ids=input_ids, attention_mask=mask).last_hidden_state
            expected[name] = out[mask.bool()]
    torch.save(expected, path)


def check(name: str, precision: str, out: torch.Tensor, workload: Workload, expected: dict[str, torch.Tensor]) -> float:
    """The quality of `out`: the cosine to the oracle, averaged over a sequence's tokens, of the worst sequence.

    Raises AssertionError when `out` may not be timed: in a float dtype by the error rule, in int8 by `LOWEST_COSINE`.
    """
    lengths = workload.lengths[:CHECKED_SEQUENCES]
    actual = torch.cat([sequence[:length] for sequence, length in zip(out, lengths, strict=False)])
    oracle = expected["float64"]
    assert actual.shape == oracle.shape, f"{name}: shape {tuple(actual.shape)}, oracle {tuple(oracle.shape)}"
    cosines = torch.cosine_similarity(actual.double(), oracle, dim=-1)
    quality = min(float(sequence.mean()) for sequence in cosines.split(lengths))
    judge(name, precision, actual, expected, quality)
    return quality


def judge(name: str, precision: str, actual: torch.Tensor, expected: dict[str, torch.Tensor], quality: float) -> None:
    """Raise AssertionError when an output may not be timed. `expected` has the oracle, "float64", and what the literal
    formula gives in the precision; `quality` is the cosine to the oracle.
    """
    if precision == "int8":
        assert quality >= LOWEST_COSINE, f"{name}: cosine to the oracle {quality:.4f} is under {LOWEST_COSINE}"
    else:
        baseline = expected[precision]
        assert_close_to_reference(actual.to(baseline.dtype), expected["float64"], baseline, GRADIENT_FACTOR, name)


def contest(name: str, job: BenchJob, workload: Workload, reference: Path, answer: Answer) -> None:
    input_ids, mask = workload.batch()
    start = time.perf_counter()
    with torch.inference_mode():
        call = CONTESTANTS[name].load(job, input_ids, mask if job.masked else None)
        out = call()
        start_seconds = time.perf_counter() - start
        quality = check(name, job.precision, out, workload, torch.load(reference, weights_only=True))
        call()
        answer({"start_seconds": start_seconds, "cosine": quality})
        for _ in sys.stdin:
            answer({"seconds": measure_once(call, TURN_SECONDS), "peak_memory": peak_memory()})


def measure_ceiling(precision: str, answer: Answer) -> None:
    with torch.inference_mode():
        calls = ceiling.gemms(precision)
        ceiling.rates(calls, 0.0)
        answer({})
        for _ in sys.stdin:
            answer({"gflops": ceiling.rates(calls, TURN_SECONDS / len(calls))})


def work(task: dict[str, Any], answer: Answer) -> None:
    workload = next((w for w in WORKLOADS if w.id == task.get("workload")), None)
    if task["action"] == "ceiling":
        return measure_ceiling(task["precision"], answer)
    if task["action"] == "fine-tuning":
        return fine_tuning.contest(task, answer)
    checkpoint, prepared = Path(task["folder"], "checkpoint"), Path(task["folder"], "prepared")
    if task["action"] == "checkpoint":
        write_checkpoint(task["model"], checkpoint)
        prepared.mkdir()
        return answer({})
    assert workload is not None
    reference = Path(task["folder"], f"{workload.id}.pt")
    if task["action"] == "reference":
        write_reference(task["model"], checkpoint, workload, reference)
        return answer({})
    name = task["contestant"]
    job = BenchJob(checkpoint, prepared, task["precision"], workload.masked, task["threads"])
    if task["action"] == "prepare":
        prepare = CONTESTANTS[name].prepare
        return answer(prepare(job) if prepare else {})
    return contest(name, job, workload, reference, answer)


def report_in_one_line(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The last line on stderr is what the table says of a contestant that failed."""
    traceback.print_exception(error_type, error, trace)
    sys.stderr.write(f"{error_type.__name__}: {' '.join(str(error).split())[:300]}\n")


def serve(work: Callable[[dict[str, Any], Answer], None]) -> None:
    """Do the task of the command line: the whole of such a process."""
    sys.excepthook = report_in_one_line
    # Libraries write progress to stdout, in C too: answers go to the stdout that was given, everything else to stderr.
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        stdout.write(json.dumps(content) + "\n")
        stdout.flush()

    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    work(task, answer)


if __name__ == "__main__":
    serve(work)
