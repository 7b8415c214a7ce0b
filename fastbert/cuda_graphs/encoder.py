"""An encoder whose small batches run through CUDA graphs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from fastbert.backend import Backend, _choice, first_to_serve
from fastbert.cuda_graphs.blocks import StaticBatch
from fastbert.cuda_graphs.buckets import INFERENCE, Sizes, bucket_for
from fastbert.cuda_graphs.capture import CudaGraphs, Graphs, Replay
from fastbert.execution.request import EncoderInputs
from fastbert.layer_spec import Distances
from fastbert.layers.guard import ModuleGuard
from fastbert.layers.leaves import FORWARD_HOOKS
from fastbert.models.base import EncoderModel, must_be_called
from fastbert.models.outputs import ModelOutput
from fastbert.packed_inputs import ModelInputs, PackedInputs
from fastbert.packing import PackedBatch


class _Key(NamedTuple):
    """What a graph is for. asked: the backend that was asked for by name."""

    bucket: Sizes
    has_types: bool
    asked: Backend | None


class _Captured(NamedTuple):
    """A bucket's graph: `replay` runs the encoder over what the static batch holds; `out` then has its result."""

    static: StaticBatch
    out: list[torch.Tensor]
    replay: Replay


class GraphedEncoder:
    """A fastbert encoder whose small batches run through CUDA graphs; call it as the model is called.

    `why_eager` says why the last call ran without a graph. It is None if the call ran through one.
    """

    def __init__(
        self,
        model: EncoderModel,
        max_tokens: int,
        max_graphs: int,
        max_memory: int,
        make_graphs: Callable[[torch.device], Graphs] | None = None,
    ):
        """As `fastbert.graphs`. make_graphs: what captures on a device; None: CUDA graphs, which go one by one."""
        if not isinstance(model, EncoderModel):
            raise TypeError(f"fastbert.graphs takes a fastbert encoder (a base model), not {type(model).__name__}")
        if min(max_tokens, max_graphs, max_memory) < 1:
            raise ValueError(
                f"max_tokens {max_tokens}, max_graphs {max_graphs}, max_memory {max_memory}: at least 1 each"
            )
        self.model, self.max_tokens, self.max_graphs, self.max_memory = model, max_tokens, max_graphs, max_memory
        self.why_eager: str | None = "nothing has run yet"
        self._make_graphs = make_graphs or partial(CudaGraphs, shares_memory=False)
        self._device, self._graphs = model.device, self._make_graphs(model.device)
        self._captured: OrderedDict[_Key, _Captured] = OrderedDict()
        self._captured_from: ModuleGuard | None = None
        self._lock = threading.Lock()  # a graph's buffers hold one batch at a time

    # ----------------------------------------------------------------------------------------------------------------
    # What is there

    @property
    def buckets(self) -> list[Sizes]:
        """Those captured, the least recently used first."""
        return [key.bucket for key in self._captured]

    @property
    def nbytes(self) -> int:
        """GPU memory that the graphs hold."""
        return self._graphs.nbytes() + sum(captured.static.block.nbytes for captured in self._captured.values())

    def clear(self) -> None:
        """Let go of all graphs and their memory."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        self._graphs.free()
        self._captured.clear()
        self._captured_from = None

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
                input_ids,
                attention_mask,
                token_type_ids,
                position_ids,
                inputs_embeds,
                output_attentions,
                output_hidden_states,
                return_dict,
                cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen,
                batch=batch,
                task_type_ids=task_type_ids,
            )
        model_inputs = ModelInputs(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            cu_seqlens,
            max_seqlen,
            batch,
            task_type_ids,
        )
        inputs = model.prepare(model_inputs)
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
        model_inputs = ModelInputs(
            input_ids,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            task_type_ids=task_type_ids,
        )
        inputs = self.model.prepare(model_inputs)
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
        if (reason := self._graphs.unsupported(device)) is not None:
            return reason
        if torch.is_autocast_enabled("cuda"):
            return "autocast is on: it frees its copies of weights, which a graph would go on reading"
        heads = model.config.num_attention_heads
        probe = torch.empty(2, heads, model.config.hidden_size // heads, device=device, dtype=model.dtype)
        if first_to_serve("attention", probe, probe, probe) in (None, Backend.TORCH):
            return "attention runs on the torch backend, which needs the lengths of sequences on the host"
        return None

    def _tree_unsupported(self) -> str | None:
        """Forget the graphs where the model is not what they were captured from; why its leaves must be called."""
        if self._captured_from is None or not self._captured_from.is_same():
            self._clear()
            self._captured_from = ModuleGuard.of_all(self.model, FORWARD_HOOKS, ())  # its own are for its caller
            if self._device != self.model.device:
                self._device = self.model.device
                self._graphs = self._make_graphs(self._device)
        if self._captured_from.has_hooks():
            return "a module inside the model has hooks"
        if any([module.training for module in self._captured_from.modules]):
            return "a module inside the model is in training mode"
        return None

    def _encode(self, inputs: EncoderInputs) -> torch.Tensor:
        """The packed last hidden state of checked inputs."""
        batch = inputs.batch
        with self._lock:
            self.why_eager = self._tree_unsupported()
            if inputs.ids.input_ids is None:
                self.why_eager = "inputs_embeds are not copied"
            elif batch.num_keys is not None:
                self.why_eager = "some tokens attend that nothing attends to"
            elif inputs.window_positions is not None and (self.model.config.distances or Distances()).relatives:
                self.why_eager = "relative positions go by columns, and a mask has padding between its tokens"
            elif not 0 < batch.total_tokens <= self.max_tokens:
                self.why_eager = f"{batch.total_tokens} tokens are not within 1 to {self.max_tokens}"
            if self.why_eager is None:
                return self._replay(inputs)
        return self.model.encode(inputs).packed

    def _replay(self, inputs: EncoderInputs) -> torch.Tensor:
        batch = inputs.batch
        sizes = Sizes(batch.total_tokens, batch.batch_size, min(batch.max_seqlen, batch.total_tokens))
        key = _Key(bucket_for(sizes, INFERENCE), inputs.ids.token_type_ids is not None, _choice.forced)
        if key not in self._captured:
            self._captured[key] = self._capture(key)
            self._evict()
        self._captured.move_to_end(key)
        captured = self._captured[key]
        self._graphs.begin()
        captured.static.fill(inputs)
        captured.replay()
        out = captured.out[0][: batch.total_tokens].clone()  # the next batch is written where this one is
        self._graphs.end()
        return out

    def _capture(self, key: _Key) -> _Captured:
        config, out = self.model.config, list[torch.Tensor]()
        has_tasks = config.embeddings.task_type is not None
        with torch.inference_mode(False), torch.no_grad():
            static = StaticBatch(key.bucket, self._device, config.distances, key.has_types, has_tasks)

            def run() -> None:
                out[:] = [self.model.encode(static.inputs()).packed]

            for _ in range(2):  # kernels are compiled at the first call, and what is made for a batch at the second
                self._graphs.warm(run)
            return _Captured(static, out, self._graphs.capture(run))

    def _evict(self) -> None:
        """The least recently used graphs, but never the newest: a batch's own is what it runs on."""
        while len(self._captured) > 1 and (len(self._captured) > self.max_graphs or self.nbytes > self.max_memory):
            self._graphs.free(self._captured.popitem(last=False)[1].replay)
