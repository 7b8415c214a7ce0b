"""fastbert.graphs(model): CUDA graphs for inference on batches so small that launching their kernels takes the time.

A graph replays the kernels of one shape. Batches have many shapes, so they are rounded up to buckets. The tokens of a
batch are copied to the front of a bucket's own buffers; the rows behind them are slack, and cu_seqlens continues with
empty sequences. Every op defines both. A bucket's graph is captured when it is first used. Checks and packing run
before the graph, because they ask the host; unpacking and the pooler run after it. Calls that a graph cannot serve, or
would not make faster, run in the model itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from fastbert.backend import Backend, _choice, first_to_serve
from fastbert.execution.request import EncoderInputs
from fastbert.layer_spec import Distances
from fastbert.layers.embeddings import EmbeddingIds
from fastbert.layers.fingerprint import ModuleFingerprint
from fastbert.layers.leaves import FORWARD_HOOKS
from fastbert.models.base import EncoderModel, must_be_called
from fastbert.models.outputs import ModelOutput
from fastbert.packed_inputs import ModelInputs, PackedInputs
from fastbert.packing import PackedBatch

GPU = "cuda"


class Bucket(NamedTuple):
    """The shape of one graph: upper bounds of a batch's tokens, sequences and longest sequence."""

    total_tokens: int
    batch_size: int
    max_seqlen: int
    has_types: bool


def bucket_of(total_tokens: int, batch_size: int, max_seqlen: int, has_types: bool, max_tokens: int) -> Bucket | None:
    """The smallest bucket that holds a batch; None where it is empty or has more than `max_tokens` tokens.

    Sequences and the longest are rounded to powers of two, tokens to those and the middles between them: from 32 tokens
    on at most a third of a graph's rows are slack.
    """
    if not 0 < total_tokens <= max_tokens:
        return None
    tokens = max(16, _power_of_two(total_tokens))
    if tokens >= 64 and total_tokens <= tokens // 4 * 3:
        tokens = tokens // 4 * 3
    return Bucket(tokens, _power_of_two(batch_size), max(16, _power_of_two(max_seqlen)), has_types)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@dataclass
class StaticBatch:
    """A bucket's buffers, where its graph reads: int64 ids (5, total_tokens) and int32 cu_seqlens (batch_size + 1,).

    ids: words, positions, token types, columns, by which windows measure distances, and task types. `goes_by` says what
    the layers measure: where there is rotary embedding, positions are its own. `has_tasks`: the family has task types.
    """

    bucket: Bucket
    ids: torch.Tensor
    cu_seqlens: torch.Tensor
    goes_by: Distances | None
    has_tasks: bool = False

    @classmethod
    def empty(
        cls, bucket: Bucket, device: torch.device, goes_by: Distances | None, has_tasks: bool = False
    ) -> StaticBatch:
        """One sequence as long as the bucket allows, of ids 0: what a capture runs on."""
        with torch.inference_mode(False):  # or the buffers could not be written outside of inference mode
            ids = torch.zeros(5, bucket.total_tokens, dtype=torch.int64, device=device)
            length = min(bucket.total_tokens, bucket.max_seqlen)
            cu_seqlens = torch.full((bucket.batch_size + 1,), length, dtype=torch.int32, device=device)
            cu_seqlens[:1].zero_()
            ids[3].copy_(torch.arange(bucket.total_tokens, device=device))
        return cls(bucket, ids, cu_seqlens, goes_by, has_tasks)

    def fill(self, inputs: EncoderInputs) -> None:
        """Copy a checked batch in. Slack rows keep an earlier batch's ids: they are valid, and nobody reads them."""
        batch, tokens, ids = inputs.batch, inputs.batch.total_tokens, inputs.ids
        assert ids.input_ids is not None
        self.ids[0, :tokens].copy_(ids.input_ids)
        if ids.token_type_ids is not None:
            self.ids[2, :tokens].copy_(ids.token_type_ids)
        if ids.task_type_ids is not None:
            self.ids[4, :tokens].copy_(ids.task_type_ids)
        else:
            self.ids[4, :tokens].zero_()
        if ids.position_ids is not None and (self.goes_by is None or not self.goes_by.rotaries):
            self.ids[1, :tokens].copy_(ids.position_ids)
        if self.goes_by is not None:
            places = batch.local_positions()
            for row, positions in ((1, inputs.rotary_positions), (3, inputs.window_positions)):
                if row == 3 or self.goes_by.rotaries:
                    self.ids[row, :tokens].copy_(places if positions is None else positions)
        self.cu_seqlens[: batch.batch_size + 1].copy_(batch.cu_seqlens)
        self.cu_seqlens[batch.batch_size + 1 :].fill_(tokens)

    def inputs(self) -> EncoderInputs:
        """The buffers as a batch, with a cache of its own: what is derived from cu_seqlens belongs into the graph."""
        tokens, sequences, longest, has_types = self.bucket
        batch = PackedBatch(None, self.cu_seqlens, longest, sequences, None, tokens)
        words, positions, types, columns, tasks = self.ids
        task_type_ids = tasks if self.has_tasks else None
        ids = EmbeddingIds(words, positions, types if has_types else None, task_type_ids, None)
        if self.goes_by is None:
            return EncoderInputs(batch, ids)
        # Relative terms know how far apart two tokens can be: the places of a sequence, not columns with gaps.
        return EncoderInputs(batch, ids, positions, None if self.goes_by.relatives else columns)

    def nbytes(self) -> int:
        return self.ids.nbytes + self.cu_seqlens.nbytes


class Turns:
    """What the graphs of one encoder share, because of which they run one after the other on the GPU.

    All are captured on one stream: the scratch memory of cuBLAS belongs to a stream, so they have one such memory and
    not 32 MiB a graph, and two of them must not run at once. `begin` and `end` stand around everything that touches a
    graph's buffers, whatever the caller's stream.
    """

    def __init__(self, device: torch.device):
        self.device = device
        with torch.cuda.device(device):
            self.stream, self.done = torch.cuda.Stream(device), torch.cuda.Event()

    def begin(self) -> None:
        """A caller on another stream than the last one's must not overwrite what that one still reads."""
        torch.cuda.current_stream(self.device).wait_event(self.done)

    def end(self) -> None:
        self.done.record(torch.cuda.current_stream(self.device))


# Of the process, for inference and training: two captures at once would count on in one random number generator, which
# torch refuses, and what is freed meanwhile would end them.
capturing = threading.Lock()


class Captured:
    """One bucket's graph: `replay` runs `encode` over what the static batch holds, into `out`."""

    def __init__(self, encode: Callable[[EncoderInputs], torch.Tensor], static: StaticBatch, turns: Turns):
        self.static, self.turns = static, turns
        device, stream = turns.device, turns.stream
        with capturing, torch.cuda.device(device):
            callers = torch.cuda.current_stream(device)
            turns.begin()
            stream.wait_stream(callers)
            with torch.cuda.stream(stream):  # compiles what is not compiled yet, and makes libraries' handles
                for _ in range(2):
                    encode(static.inputs())
            callers.wait_stream(stream)
            torch.cuda.empty_cache()  # as the capture does: what it then reserves is the graph's own
            before = torch.cuda.memory_reserved(device)
            self.graph = torch.cuda.CUDAGraph()
            try:
                # thread_local: other threads may allocate meanwhile, on streams that are not captured.
                with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                    self.out = encode(static.inputs())
            finally:
                torch.cuda.set_stream(callers)  # torch leaves the capture's stream set where the capture is invalid
            self.nbytes = max(0, torch.cuda.memory_reserved(device) - before) + static.nbytes()

    def replay(self) -> None:
        self.graph.replay()

    def free(self) -> None:
        self.turns.done.synchronize()
        with capturing:
            self.graph.reset()


def _look_at(model: nn.Module) -> ModuleFingerprint:
    """All that a captured graph has written down of a model: weights' memory, and what calling its modules does."""
    fingerprint = ModuleFingerprint(model, with_memory=True)
    for module in model.modules():
        fingerprint.watch(module, () if module is model else FORWARD_HOOKS)  # the model's own hooks are for its caller
        if module._modules:
            fingerprint.watch_children(module)
    return fingerprint


class GraphedEncoder:
    """A fastbert encoder whose small batches run through CUDA graphs; call it as the model is called.

    `why_eager` says why the last call ran without a graph. It is None if the call ran through one.
    """

    def __init__(self, model: EncoderModel, max_tokens: int, max_graphs: int, max_memory: int):
        if not isinstance(model, EncoderModel):
            raise TypeError(f"fastbert.graphs takes a fastbert encoder (a base model), not {type(model).__name__}")
        if min(max_tokens, max_graphs, max_memory) < 1:
            raise ValueError(
                f"max_tokens {max_tokens}, max_graphs {max_graphs}, max_memory {max_memory}: at least 1 each"
            )
        self.model, self.max_tokens, self.max_graphs, self.max_memory = model, max_tokens, max_graphs, max_memory
        self.why_eager: str | None = "nothing has run yet"
        self._graphs: OrderedDict[tuple[Bucket, Backend | None], Captured] = OrderedDict()
        self._captured: ModuleFingerprint | None = None  # what they were captured from
        self._turns: Turns | None = None
        self._lock = threading.Lock()  # a graph's buffers hold one batch at a time

    # ----------------------------------------------------------------------------------------------------------------
    # What is there

    @property
    def buckets(self) -> list[Bucket]:
        """Those captured, the least recently used first."""
        return [bucket for bucket, _ in self._graphs]

    @property
    def nbytes(self) -> int:
        """GPU memory that the graphs hold."""
        return sum(captured.nbytes for captured in self._graphs.values())

    def clear(self) -> None:
        """Let go of all graphs and their memory."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        for captured in self._graphs.values():
            captured.free()
        self._graphs.clear()
        self._captured = None

    # ----------------------------------------------------------------------------------------------------------------
    # Calls

    def __call__(
        self,
        input_ids: torch.Tensor | PackedInputs | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        *,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        batch: PackedBatch | None = None,
        task_type_ids: torch.Tensor | None = None,
    ) -> ModelOutput | tuple:
        """`model.forward`; raises what that raises, before anything is launched."""
        model = self.model
        self.why_eager = self._unsupported()
        if output_attentions or output_hidden_states:
            self.why_eager = "output_attentions and output_hidden_states leave a graph"
        if must_be_called(model):
            self.why_eager = "the model has hooks, or a forward of its own"
        if self.why_eager is not None:
            return model(
                input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, output_attentions,
                output_hidden_states, return_dict, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, batch=batch,
                task_type_ids=task_type_ids,
            )  # fmt: skip
        given = ModelInputs(
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, cu_seqlens, max_seqlen, batch,
            task_type_ids,
        )  # fmt: skip
        inputs = model.prepare(given)
        model.calls.ran_packed()
        packed = self._encode(inputs)
        output = ModelOutput(
            last_hidden_state=inputs.batch.unpack(packed),
            pooler_output=model.pool(packed, inputs.batch) if model.has_pooler else None,
        )
        return output.to_tuple() if return_dict is False else output

    def encode_packed(
        self,
        input_ids: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        task_type_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`model.encode_packed`: packed in, packed out."""
        self.why_eager = self._unsupported()
        given = ModelInputs(
            input_ids, token_type_ids=token_type_ids, position_ids=position_ids, cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen, task_type_ids=task_type_ids,
        )  # fmt: skip
        inputs = self.model.prepare(given)
        self.model.calls.ran_packed()
        return self.model.encode(inputs).packed if self.why_eager is not None else self._encode(inputs)

    def _unsupported(self) -> str | None:
        """Why no call can go through a graph now."""
        model = self.model
        if torch.compiler.is_compiling():
            return "torch.compile has graphs of its own"
        if model.training:
            return "the model is in training mode"
        if torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters()):
            return "gradients are on: call under torch.no_grad() or torch.inference_mode()"
        device = model.device
        if device.type != GPU:
            return f"the model is on {device.type}"
        if torch.is_autocast_enabled("cuda"):
            return "autocast keeps copies of weights that a graph would outlive"
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "the caller is capturing a graph"
        heads = model.config.num_attention_heads
        probe = torch.empty(2, heads, model.config.hidden_size // heads, device=device, dtype=model.dtype)
        if first_to_serve("attention", probe, probe, probe) in (None, Backend.TORCH):
            return "attention runs in torch, which asks the host for the lengths"
        return None

    def _tree_unsupported(self) -> str | None:
        """Forget the graphs where the model is not what they were captured from; why its leaves must be called."""
        if self._captured is None or not self._captured.is_same():
            self._clear()
            self._captured = _look_at(self.model)
        if self._captured.has_hooks():
            return "a module inside the model has hooks"
        if any([module.training for module in self._captured.modules]):
            return "a module inside the model is in training mode"
        return None

    def _encode(self, inputs: EncoderInputs) -> torch.Tensor:
        """The packed last hidden state of checked inputs."""
        batch, has_types = inputs.batch, inputs.ids.token_type_ids is not None
        longest = min(batch.max_seqlen, batch.total_tokens)
        bucket = bucket_of(batch.total_tokens, batch.batch_size, longest, has_types, self.max_tokens)
        with self._lock:
            self.why_eager = self._tree_unsupported()
            if inputs.ids.input_ids is None:
                self.why_eager = "inputs_embeds are not copied"
            elif inputs.window_positions is not None and (self.model.config.distances or Distances()).relatives:
                self.why_eager = "relative positions go by columns, and a mask has padding between its tokens"
            elif bucket is None:
                self.why_eager = f"{batch.total_tokens} tokens are not within 1 to {self.max_tokens}"
            if self.why_eager is None:
                assert bucket is not None
                return self._replay(bucket, inputs)
        return self.model.encode(inputs).packed

    def _replay(self, bucket: Bucket, inputs: EncoderInputs) -> torch.Tensor:
        device = inputs.batch.cu_seqlens.device
        key = (bucket, _choice.forced)
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._capture(bucket, device)
            self._graphs[key] = captured
            self._evict()
        self._graphs.move_to_end(key)
        captured.turns.begin()
        captured.static.fill(inputs)
        captured.replay()
        out = captured.out[: inputs.batch.total_tokens].clone()  # the next batch is written where this one is
        captured.turns.end()
        return out

    def _capture(self, bucket: Bucket, device: torch.device) -> Captured:
        if self._turns is None or self._turns.device != device:
            self._turns = Turns(device)
        with torch.inference_mode(False), torch.no_grad():
            config = self.model.config
            has_tasks = config.embeddings.task_type is not None
            static = StaticBatch.empty(bucket, device, config.distances, has_tasks)
            return Captured(lambda inputs: self.model.encode(inputs).packed, static, self._turns)

    def _evict(self) -> None:
        """The least recently used graphs, but never the newest: a batch's own is what it runs on."""
        while len(self._graphs) > 1 and (len(self._graphs) > self.max_graphs or self.nbytes > self.max_memory):
            self._graphs.popitem(last=False)[1].free()


def graphs(
    model: EncoderModel, *, max_tokens: int = 8192, max_graphs: int = 32, max_memory: int = 2 << 30
) -> GraphedEncoder:
    """CUDA graphs for inference. Call the result as you call `model`, under torch.no_grad() or inference_mode().

    Graphs see weights that change in place. If a weight is replaced, the next call captures a new graph.

    Args:
        model: a fastbert encoder (a base model, without a head), in eval mode, on a GPU. Elsewhere it runs as it is.
        max_tokens: batches with more real tokens run without a graph. Launching takes little time beside their kernels.
        max_graphs: how many graphs are kept. Beyond it, the graph that was not used for the longest time is freed.
        max_memory: how many bytes of GPU memory the graphs may hold, with the same rule.

    Raises:
        TypeError: the model has a head; wrap its `base_model`. ValueError: a bound is below 1.
    """
    return GraphedEncoder(model, max_tokens, max_graphs, max_memory)
