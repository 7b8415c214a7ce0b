"""The forward that an accelerated base model gets: it packs the batch, runs fastbert's encoder over the model's own
leaves, and unpacks the result.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fastbert.acceleration.attributes import SeenBuffers, buffer_unsupported
from fastbert.acceleration.instance import OnInstance, argument_names
from fastbert.acceleration.plan import PackedPlan, live
from fastbert.acceleration.tree import LiveTree, take_snapshot
from fastbert.acceleration.unsupported import (
    OPTIONS,
    TENSORS,
    Flattened,
    call_unsupported,
    documents_of,
    flattened,
    flattened_unsupported,
    query_only_unsupported,
)
from fastbert.config import EncoderConfig
from fastbert.errors import ConfigError, InputError
from fastbert.execution import at_once, run
from fastbert.execution.calls import Calls
from fastbert.execution.request import EncoderInputs, EncoderOutput, PackedIds, Wanted, first_tokens, run_pooler
from fastbert.execution.snapshot import Snapshot
from fastbert.families.schema import Family
from fastbert.layers.leaves import get_leaf, parent_of
from fastbert.layers.sharded import call_sharded, is_sharded, without_views
from fastbert.models.inputs import TableSizes, prepare_inputs
from fastbert.models.tree import RunsBaseModel
from fastbert.ops import transform_unsupported
from fastbert.packed_inputs import ModelInputs
from fastbert.packing import NOT_ONE_GRAPH, PADDED_LABELS, PackedBatch, is_all_ones

NOT_CALLED = "accelerated, not called yet"


class Forward(OnInstance, RunsBaseModel):
    """The forward of one accelerated base model."""

    def __init__(self, module: nn.Module, plan: PackedPlan):
        super().__init__(module, plan)
        self.plan = plan
        self.said: set[str] = set()
        self.calls = Calls()
        self._seen_buffers: SeenBuffers = {}
        self._told = threading.local()
        # Under torch.compile the checks still run, and run each time: a graph would keep the answers of its first call.
        self._admit = torch.compiler.disable(self.admit, reason=NOT_ONE_GRAPH)

    def config_now(self) -> EncoderConfig:
        return live(self.module, self.plan)[0]

    def line(self) -> str:
        """What repr(model) says: it stands in the place of the module's extra_repr."""
        return f"fastbert: {str(self.calls) or NOT_CALLED}"

    def expect(self, **told: Any) -> None:
        """What a module around has to say of the next call of this thread, which comes right after. A head: its
        `labels` of tokens; as `given`, arguments for attention, which some heads of transformers take and do not hand
        on. sentence-transformers' Transformer: as `query_only`, bool (batch, seqlen), which masked tokens attend.
        """
        self._told.__dict__.update(told)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, admitted = self.module, None
        args = args[1:] if args and args[0] is module else args  # HF accelerate rebinds what it unwraps as a method
        if self.is_recorded():
            self.leave("torch.jit.trace and torch.export record transformers' own code")
        else:
            admitted = self._admit(module, args, kwargs)
        return type(module).forward(module, *args, **kwargs) if admitted is None else self.run(module, *admitted)

    def admit(self, module: Any, args: tuple, kwargs: dict) -> tuple | None:
        """What `run` takes, or None where transformers' own forward must run. Raises InputError."""
        names = argument_names(type(module))
        call_args = {**dict(zip(names, args)), **kwargs}  # noqa: B905  (transformers complains about too many)
        if len(call_args) < len(args) + len(kwargs):
            return None
        older = "return_dict" in names  # the older kind of forward takes an option of None for not given
        if isinstance(call_args.get("batch"), PackedBatch):
            raise InputError(
                f"{self.plan.label} is transformers' model, which takes no PackedInputs: use fastbert's own class"
                " (fastbert.AutoModelFor...), or give padded batches, which accelerate packs"
            )
        absent = {name for name in OPTIONS if name not in call_args or (older and call_args[name] is None)}
        options = {name: getattr(module.config, name) if name in absent else call_args[name] for name in OPTIONS}
        snapshot: Snapshot | str
        told = self._told.__dict__
        labels, call_args = told.pop("labels", None), {**told.pop("given", {}), **call_args}
        query_only = told.pop("query_only", None)
        try:
            config, tables = live(module, self.plan)
            documents = documents_of(self.plan, module.config, call_args)
            unsupported = transform_unsupported() or query_only_unsupported(self.plan, call_args, query_only)
            unsupported = unsupported or (documents if isinstance(documents, str) else None)
            mask, words = call_args.get("attention_mask"), call_args.get("input_ids")
            has_padding = _padding_in(mask, words) if unsupported is None else None
            if has_padding is False:
                call_args = {**call_args, "attention_mask": None}  # which all that follows looks at
            unsupported = unsupported or call_unsupported(module, self.plan, tables, call_args, options)
            unsupported = unsupported or buffer_unsupported(module, config, call_args, self._seen_buffers)
            if unsupported is None and call_args.get("cu_seq_lens_q") is not None:
                unsupported = flattened_unsupported(self.plan, call_args)
            snapshot = unsupported or take_snapshot(module, self.plan, config)
        except KeyError as error:
            snapshot = f"there is no {error} where transformers had it"
        except ConfigError as error:  # of a number of layers that the rest of the config does not go with
            snapshot = str(error)
        if isinstance(snapshot, str):
            self.leave(snapshot)
            return None
        # Transformers' forward swallows what it does not take, as DistilBERT's what a BERT tokenizer made.
        tensors = {name: call_args.get(name) if name in names else None for name in TENSORS}
        if config.embeddings.token_type is None:
            tensors["token_type_ids"] = None
        if config.embeddings.task_type is None:
            tensors["task_type_ids"] = None
        row = flattened(module.config, call_args, options, documents)
        tree = LiveTree(module, snapshot, self.calls)
        wanted = self._wanted(module, snapshot.config, options)
        if row is None and labels is None and query_only is None and not wanted.is_of_layers:
            # A mask that says nothing is None by now: what a family without token types takes of them is, too.
            has_padding = has_padding if tensors["attention_mask"] is not None else False
            ids = PackedIds.of_grid(ModelInputs(**tensors), True, has_padding)
            done = at_once(tree, ids, wanted.pooler)
            if done is not None:
                assert ids is not None
                self.calls.ran_packed()
                return tree, None, (done, ids.batch), wanted, options, older
        inputs = _prepare(config, tables, tensors, row, labels, has_padding, query_only)
        if labels is not None and (inputs.batch.bounds or {}).get(PADDED_LABELS, (0, 0))[1]:
            self.leave("labels other than -100 at padding: transformers' loss goes over hidden states there")
            return None
        self.calls.ran_packed()
        return tree, inputs, None, wanted, options, older

    def _wanted(self, module: Any, config: EncoderConfig, options: dict) -> Wanted:
        pools = _has_pooler(module, self.plan.family)
        asks = bool(options["output_hidden_states"]), bool(options["output_attentions"])
        return Wanted.of_all(len(config.layer_paths), *asks, pools) if any(asks) else Wanted(pooler=pools)

    def leave(self, reason: str) -> None:
        """Note that a call runs in transformers' own forward, and say why, once for each reason."""
        self.calls.left(reason)
        self.say(reason)

    def say(self, reason: str) -> None:
        if reason not in self.said:
            self.said.add(reason)
            warnings.warn(f"fastbert: {self.plan.label} runs transformers' own forward: {reason}", stacklevel=5)

    def run(
        self,
        module: Any,
        tree: LiveTree,
        inputs: EncoderInputs | None,
        done: tuple[EncoderOutput, PackedBatch] | None,
        wanted: Wanted,
        options: dict,
        older: bool,
    ) -> Any:
        """Encode `inputs`, where that is not `done`, pool and unpack; transformers' own output, down to its habits."""
        family = self.plan.family
        if done is None:
            assert inputs is not None
            done = run(tree, inputs, wanted), inputs.batch
        encoded, batch = done
        fields: dict[str, Any] = {"last_hidden_state": encoded.last_state(batch)}
        if family.pooler is not None:
            pooled = encoded.pooled
            if pooled is None and _has_pooler(module, family):
                pooled = _pool(module, family, first_tokens(encoded.packed, batch), tree.sharded)
            # Of a row of several sequences, transformers pools the first.
            fields["pooler_output"] = pooled[:1] if pooled is not None and batch.in_one_row else pooled
        fields |= encoded.extras()
        if is_sharded(module):
            fields = {name: without_views(value) for name, value in fields.items()}

        if older and not options["return_dict"]:
            return tuple(fields.values())  # which keeps the place of a pooled output that there is not
        if options["output_attentions"] and not older and "cross_attentions" in module._can_record_outputs:
            fields["cross_attentions"] = ()  # transformers' recorder has found none
        from transformers import modeling_outputs

        output = getattr(modeling_outputs, family.hf_class.output)(**fields)
        return output.to_tuple() if options["return_dict"] is False else output


def _has_pooler(module: Any, family: Family) -> bool:
    return family.pooler is not None and module.pooler is not None


def _padding_in(mask: Any, ids: Any) -> bool | None:
    """Whether a mask is not all ones; None where that was not looked at. It may be of any kind of integers."""
    are_plain = type(mask) is torch.Tensor and type(ids) is torch.Tensor and mask.is_cpu
    return not is_all_ones(mask) if are_plain and mask.shape == ids.shape else None


def _prepare(
    config: EncoderConfig,
    tables: TableSizes,
    tensors: dict,
    row: Flattened | None,
    labels: torch.Tensor | None,
    has_padding: bool | None,
    query_only: torch.Tensor | None,
) -> EncoderInputs:
    if row is not None:
        tensors = {name: None if t is None else t[0] for name, t in tensors.items()} | {"attention_mask": None}
        row_inputs = ModelInputs(**tensors, cu_seqlens=row.cu_seqlens, max_seqlen=row.max_seqlen)
        inputs = prepare_inputs(config, tables, row_inputs)
        return replace(inputs, batch=replace(inputs.batch, in_one_row=True))
    if tensors["attention_mask"] is not None:
        tensors["attention_mask"] = tensors["attention_mask"] != 0  # every other value is "real" to transformers
        labels = None if labels is None or labels.shape != tensors["attention_mask"].shape else labels
    return prepare_inputs(config, tables, ModelInputs(**tensors), labels, has_padding, query_only)


def _pool(module: Any, family: Any, first: torch.Tensor, sharded: frozenset[str]) -> torch.Tensor:
    path = parent_of(family.pooler) if sharded else None
    if path is None or path not in sharded:
        return run_pooler(module, family, first)
    return call_sharded(get_leaf(module, path), partial(run_pooler, module, family), first)
