"""The forward that an accelerated base model gets: it packs the batch, runs fastbert's encoder over the model's own
leaves, and unpacks the result.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from fastbert.acceleration.objections import OPTIONS, TENSORS, call_objection, tree_objection
from fastbert.acceleration.plan import Plan, live
from fastbert.config import ConfigError, EncoderConfig
from fastbert.layers.encoder import run_layer
from fastbert.models.encode import first_tokens, run_encoder, run_pooler, unpacked_extras
from fastbert.models.inputs import EncoderInputs, prepare_inputs
from fastbert.models.tree import RunsBaseModel


@lru_cache(maxsize=32)
def _signature(kind: Any) -> inspect.Signature:
    signature = inspect.signature(kind.forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])  # without self


@lru_cache(maxsize=32)
def _argument_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in _signature(kind).parameters if name != "kwargs")


class Forward(RunsBaseModel):
    """The forward of one accelerated base model, which it holds weakly: dropping the model frees its weights at once.

    A copy of the model (deepcopy, pickle, torch.save) gets a forward bound to the copy.
    """

    def __init__(self, module: nn.Module, plan: Plan):
        self._module, self.plan = weakref.ref(module), plan
        self.said: set[str] = set()
        # Under torch.compile the checks still run, and run each time: a graph would keep the answers of its first call.
        self._admit = torch.compiler.disable(self.admit, reason="fastbert checks and packs batches on the host")

    @property
    def module(self) -> Any:
        module = self._module()
        if module is None:
            raise ReferenceError(f"the accelerated model {self.plan.label} is gone; only its forward was kept")
        return module

    def config_now(self) -> EncoderConfig:
        return live(self.module, self.plan)[0]

    @property
    def __signature__(self) -> inspect.Signature:
        """transformers' own: the Trainer, PEFT and sentence-transformers choose arguments by it."""
        return _signature(self.module.__class__)

    __code__ = property(lambda self: Forward.__call__.__code__)  # torch.export names a base model's graph by it

    def __reduce__(self):
        return Forward, (self.module, self.plan)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, admitted = self.module, None
        args = args[1:] if args and args[0] is module else args  # HF accelerate rebinds what it unwraps as a method
        is_exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()  # 2.11 mixes them up
        if torch.jit.is_tracing() or is_exporting:
            self.say("torch.jit.trace and torch.export record transformers' own code")
        else:
            admitted = self._admit(module, args, kwargs)
        return type(module).forward(module, *args, **kwargs) if admitted is None else self.run(module, *admitted)

    def admit(self, module: Any, args: tuple, kwargs: dict) -> tuple | None:
        """What `run` takes, or None where transformers' own forward must run. Raises InputError."""
        names = _argument_names(module.__class__)
        given = {**dict(zip(names, args)), **kwargs}  # noqa: B905  (transformers complains about too many)
        if len(given) < len(args) + len(kwargs):
            return None
        older = "return_dict" in names  # the older kind of forward takes an option of None for not given
        absent = {name for name in OPTIONS if name not in given or (older and given[name] is None)}
        options = {name: getattr(module.config, name) if name in absent else given[name] for name in OPTIONS}
        try:
            config, tables = live(module, self.plan)
            objection = call_objection(module, self.plan, tables, given, options)
            objection = objection or tree_objection(module, self.plan, config)
        except KeyError as error:
            objection = f"there is no {error} where transformers had it"
        except ConfigError as error:  # of a number of layers that the rest of the config does not go with
            objection = str(error)
        if objection is not None:
            self.say(objection)
            return None
        # Transformers' forward swallows what it does not take, as DistilBERT's what a BERT tokenizer made.
        tensors = {name: given.get(name) if name in names else None for name in TENSORS}
        if config.embeddings.token_type is None:
            tensors["token_type_ids"] = None
        if config.embeddings.task_type is None:
            tensors["task_type_ids"] = None
        if tensors["attention_mask"] is not None:
            tensors["attention_mask"] = tensors["attention_mask"] != 0  # every other value is "real" to transformers
        inputs = prepare_inputs(config, tables, **tensors, cu_seqlens=None, max_seqlen=None)
        return config, inputs, options, older

    def say(self, reason: str) -> None:
        if reason not in self.said:
            self.said.add(reason)
            warnings.warn(f"fastbert: {self.plan.label} runs transformers' own forward: {reason}", stacklevel=4)

    def run(self, module: Any, config: EncoderConfig, inputs: EncoderInputs, options: dict, older: bool) -> Any:
        """Encode, pool and unpack; transformers' own output, down to its habits."""
        family, batch = self.plan.family, inputs.batch

        def run_one_layer(layer, spec, x, context, wants_probs):
            def run(x):
                return run_layer(layer, spec, x, context, wants_probs)

            # What gradient_checkpointing_enable() sets on transformers' layers.
            checkpointed = layer.training and layer.__dict__.get("gradient_checkpointing")
            return layer._gradient_checkpointing_func(run, x) if checkpointed else run(x)

        wants_hidden_states, wants_probs = bool(options["output_hidden_states"]), bool(options["output_attentions"])
        made = run_encoder(module, config, inputs, run_one_layer, None, wants_hidden_states, wants_probs)
        fields: dict[str, Any] = {"last_hidden_state": batch.unpack(made.packed)}
        if family.pooler is not None:
            first = None if module.pooler is None else first_tokens(made.packed, batch)
            fields["pooler_output"] = None if first is None else run_pooler(module, family, first)
        fields |= unpacked_extras(made, batch)

        if older and not options["return_dict"]:
            return tuple(fields.values())  # which keeps the place of a pooled output that there is not
        if wants_probs and not older and "cross_attentions" in module._can_record_outputs:
            fields["cross_attentions"] = ()  # transformers' recorder has found none
        from transformers import modeling_outputs

        output = getattr(modeling_outputs, family.theirs.output)(**fields)
        return output.to_tuple() if options["return_dict"] is False else output
