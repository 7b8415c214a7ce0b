"""A contestant of `make gpu`, in a process of its own: one model, forward or training, on the part's batches.

All contestants have the weights of one seed, drawn on the GPU. The encoder's outputs, and in training two gradients, of
a batch's first sequences are checked against transformers' literal formulas in float64 before anything is timed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.record import failures_of_a_kernel
from fastbert.bench.jobs import fields_without_type
from fastbert.bench.worker import serve
from fastbert.testing.cases import MODELS
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

CONTESTANTS = ("fastbert", "transformers-sdpa", "transformers-compile")
BATCHES = ("full", "half")
CHECKED = 4  # sequences: float64 is slow, and its attention large
TURN_SECONDS = 0.25
TIME_LIMIT = "TimeLimit"  # what the last line of one that gave up begins with
OUT_OF_MEMORY_TRIES = 4  # contestants prepare themselves beside each other
FIELDS = {
    **MODELS,
    "tiny-modernbert": {  # for smoke tests: one global layer among local ones
        "model_type": "modernbert",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 192,
        "local_attention": 8,
    },
    "tiny-words": {  # and for those of many steps
        "vocab_size": 200,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    },
}
PREFIXES = {"bert": "bert", "modernbert": "model"}  # the attribute that holds the encoder of a model with a head
# Of each family the first layer's query, or all three, and the last layer's first product in its feed-forward.
CHECKED_WEIGHTS = {
    "bert": ("encoder.layer.0.attention.self.query.weight", "encoder.layer.{last}.intermediate.dense.weight"),
    "modernbert": ("layers.0.attn.Wqkv.weight", "layers.{last}.mlp.Wi.weight"),
}
# Attention in float64. transformers' eager ModernBERT has its softmax in fp32, for which float64's lowest mask is -inf:
# a padded query whose window holds no key would be NaN.
LITERAL = {"bert": "eager", "modernbert": "sdpa"}


def lengths(batch: str, smoke: bool) -> list[int]:
    """64 sequences of 512 tokens, or of 8, 16, ... 512: half of it padding."""
    size, longest = (4, 16) if smoke else (64, 512)
    return [longest if batch == "full" else longest * (i + 1) // size for i in range(size)]


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Weights, biases and LayerNorms so large that a wrong one shows: as they are initialised, it drowns in bf16."""
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if parameter.dim() == 1:
            parameter.copy_(0.1 * noise + (1 if name.lower().endswith("norm.weight") else 0))
        elif "embeddings" not in name:
            parameter.copy_(0.8 * parameter.shape[1] ** -0.5 * noise)


def cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Its weights, as transformers loads them in a dtype: the frequencies of a rotary embedding stay fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


class Subject:
    """`task`: contestant, model (of FIELDS), mode "forward" or "training", precision "bf16" or "amp" (fp32 weights,
    autocast to bf16), smoke. `head`: of a model that is trained, as the Auto classes have it."""

    head = "SequenceClassification"

    def __init__(self, task: dict[str, Any]):
        self.task, self.is_training = task, task["mode"] == "training"
        self.fields = FIELDS[task["model"]]
        self.model_type = self.fields.get("model_type", "bert")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.weights = torch.float32 if task["precision"] == "amp" else torch.bfloat16
        self.calls: dict[str, Callable[[], object]] = {}
        self.seconds_of: dict[str, float] = {}
        self.model = self.build("sdpa", self.weights)
        if task["contestant"].startswith("fastbert"):
            self.model = self.ours(self.model)
        self.run: Callable[..., Any] = self.model
        self.optimizer: torch.optim.Optimizer | None = None

    # ----------------------------------------------------------------------------------------------------------------

    @property
    def class_name(self) -> str:
        return f"AutoModelFor{self.head}" if self.is_training else "AutoModel"

    def build(self, attention: str, dtype: torch.dtype) -> torch.nn.Module:
        import transformers

        kind = getattr(transformers, self.class_name)
        config = transformers.AutoConfig.for_model(self.model_type, **fields_without_type(self.fields))  # two labels
        torch.manual_seed(0)
        with torch.device(self.device):
            model: torch.nn.Module = kind.from_config(config, attn_implementation=attention)
        randomise(model)
        return cast(cast(model, self.weights), dtype).eval()  # the oracle has the weights that the others have

    def ours(self, theirs: Any) -> torch.nn.Module:
        import fastbert

        kind = getattr(fastbert, self.class_name)
        with torch.device(self.device):
            model: torch.nn.Module = kind.from_config(fastbert.EncoderConfig.from_dict(theirs.config.to_dict()))
        model = cast(model, self.weights).eval()
        model.load_state_dict(theirs.state_dict())
        if self.device.type == "cuda":  # or torch's times would stand there as ours
            chosen = fastbert.backends(self.device, torch.bfloat16)["attention"]
            assert chosen["selected"] != "torch", f"attention would run in torch: {chosen}"
        return model

    def lengths(self, batch: str) -> list[int]:
        return lengths(batch, self.task["smoke"])

    def inputs(self, batch: str) -> dict[str, torch.Tensor]:
        """Without a mask where there is no padding: everyone's fastest."""
        real = torch.tensor(self.lengths(batch))
        mask = (torch.arange(int(real.max())) < real[:, None]).long()
        ids = torch.randint(1000, 30000, mask.shape, generator=torch.Generator().manual_seed(1)) * mask
        found = {"input_ids": ids, **({"attention_mask": mask} if batch == "half" else {})}
        return {name: t.to(self.device) for name, t in found.items()}

    def autocast(self) -> Any:
        enabled = self.task["precision"] == "amp"
        return torch.autocast(self.device.type, torch.bfloat16) if enabled else nullcontext()

    # ----------------------------------------------------------------------------------------------------------------
    # Check

    def encoder_of(self, model: torch.nn.Module) -> torch.nn.Module:
        encoder: torch.nn.Module = getattr(model, PREFIXES[self.model_type]) if self.is_training else model
        return encoder

    def hidden(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The encoder's output at the real tokens of the first sequences."""
        hidden = self.encoder_of(model)(**inputs).last_hidden_state[:CHECKED]
        mask = inputs.get("attention_mask")
        real: torch.Tensor = hidden.flatten(0, 1) if mask is None else hidden[mask[:CHECKED].bool()]
        return real

    def results(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The output, and in training the gradients of the first layer's query and of the last one's first product."""
        if not self.is_training:
            with torch.no_grad():
                return {"output": self.hidden(model, inputs)}
        last = self.fields["num_hidden_layers"] - 1
        paths = [path.format(last=last) for path in CHECKED_WEIGHTS[self.model_type]]
        wanted = [self.encoder_of(model).get_parameter(path) for path in paths]
        precise = next(model.parameters()).dtype == torch.float64
        with nullcontext() if precise else self.autocast():
            hidden = self.hidden(model, inputs)
        generator = torch.Generator(self.device).manual_seed(3)
        signs = torch.randint(2, hidden.shape, generator=generator, device=self.device) * 2 - 1
        gradients = torch.autograd.grad(hidden, wanted, signs.to(hidden.dtype))
        return {"output": hidden.detach(), **dict(zip(paths, gradients, strict=True))}

    def check(self, batch: str) -> None:
        """Raises AssertionError. A compiled model is checked before it is compiled: its own graph has dropout."""
        inputs = self.inputs(batch)
        actual = self.results(self.model, inputs)
        few = {name: t[:CHECKED] for name, t in inputs.items()}
        baseline = self.results(self.build("eager", self.weights), few)
        oracle = self.results(self.build(LITERAL[self.model_type], torch.float64), few)
        for name, found in actual.items():
            as_found = baseline[name].to(found.dtype)
            assert_close_to_reference(found, oracle[name], as_found, GRADIENT_FACTOR, f"{batch} {name}")

    # ----------------------------------------------------------------------------------------------------------------
    # Time

    def step_of(self, batch: str) -> Callable[[], object]:
        inputs = self.inputs(batch)
        if not self.is_training:

            def forward() -> object:
                with torch.no_grad():  # torch.compile does not like inference mode
                    return self.run(**inputs).last_hidden_state

            return forward
        labels = torch.arange(len(inputs["input_ids"]), device=self.device) % 2

        def step() -> object:
            assert self.optimizer is not None
            self.optimizer.zero_grad(set_to_none=True)
            with self.autocast():
                loss = self.run(**inputs, labels=labels).loss
            loss.backward()
            self.optimizer.step()
            return loss

        return step

    def begin(self) -> None:
        """What stands before the first step; again, it does nothing."""
        if self.is_training and self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.model.train(self.is_training)
        if self.task["contestant"] == "transformers-compile" and self.run is self.model:
            self.run = torch.compile(self.model, dynamic=False)  # its fastest: each shape is compiled for itself

    def prepare(self, batch: str) -> dict[str, Any]:
        """Compile, warm up; the batch's real tokens and the peak memory of one step."""
        self.begin()
        step = self.step_of(batch)
        for _ in range(3):
            step()
        self.empty()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.seconds_of[batch] = self.time(step, 1)
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None
        self.calls[batch] = step
        self.empty()
        return {"tokens": sum(self.lengths(batch)), "peak_memory": peak}

    def empty(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def time(self, call: Callable[[], object], count: int) -> float:
        """Seconds a call, over `count` calls that the host launches without waiting in between."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    def turn(self, batch: str) -> dict[str, Any]:
        count = 1 if self.task["smoke"] else max(1, round(TURN_SECONDS / self.seconds_of[batch]))
        self.calls[batch]()  # what another contestant's turn has pushed out of caches comes back
        return {"seconds": self.time(self.calls[batch], count)}


def prepared(task: dict[str, Any], kind: type[Subject] = Subject) -> tuple[Subject | None, dict[str, Any]]:
    """(the subject, {batch: what `prepare` says, or why there is none}), of the task's batches; those for which no time
    is left are left.
    """
    deadline, longest = time.monotonic() + task["limit"], 0.0
    subject, found = checked(task, kind)
    for batch in (batch for batch in task["batches"] if batch not in found):
        assert subject is not None
        if time.monotonic() + longest > deadline:
            found[batch] = {"skipped": f"not prepared within {task['limit']} s"}
            continue
        start = time.monotonic()
        try:
            found[batch] = patiently(partial(subject.prepare, batch))
        except failures_of_a_kernel() as error:
            found[batch] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        longest = max(longest, time.monotonic() - start)
    return subject, found


def patiently(call: Callable[[], Any]) -> Any:
    """`call()`, again where the GPU's memory was full meanwhile: others prepare themselves beside this process."""
    for tries in range(1, OUT_OF_MEMORY_TRIES):
        try:
            return call()
        except torch.OutOfMemoryError:
            pass  # the traceback, which holds tensors, is let go before the next try
        torch.cuda.empty_cache()
        time.sleep(3 * tries)
    return call()


def checked(task: dict[str, Any], kind: type[Subject]) -> tuple[Subject | None, dict[str, Any]]:
    """(the subject, {batch: why it may not be timed}): all checks come before the first step changes the weights."""
    found: dict[str, Any] = {}
    subject: Subject | None = None
    for batch in task["batches"]:
        try:
            subject = subject or kind(task)
            patiently(partial(subject.check, batch))
            subject.empty()
        except failures_of_a_kernel() as error:
            found[batch] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return subject, found


def contest(task: dict[str, Any], answer: Callable[[dict[str, Any]], None], kind: type[Subject] = Subject) -> None:
    """A worker's process: prepares all batches, then each line on stdin names the batch of a turn."""

    def give_up() -> None:
        sys.stderr.write(f"{TIME_LIMIT}: {task['contestant']} was not prepared within {task['limit']} s\n")
        sys.stderr.flush()
        os._exit(3)

    timer = threading.Timer(task["limit"], give_up)
    timer.daemon = True
    timer.start()
    subject, found = prepared(task, kind)
    timer.cancel()
    answer(found)
    for line in sys.stdin:
        assert subject is not None
        answer(subject.turn(line.strip()))


if __name__ == "__main__":
    serve(contest)
