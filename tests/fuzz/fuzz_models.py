"""Small models of all families under a random program of steps, each after which they are run and compared.

The truth is the same tree run leaf by leaf: `fuzz_literal` for our own classes, transformers' own forward for models
that are accelerated; in float64, and in the model's dtype for what rounding may do.
"""

from __future__ import annotations

import copy
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from draw import Draw
from fuzz_driver import Fuzzer
from fuzz_literal import PLAIN, at, literal_forward
from fuzz_steps import STEPS, draw_attribute
from fuzz_subject import Subject, calls_of, hooks_of, nudged_copy
from fuzz_ways import TRANSFORMS, WRAPPERS, assert_same_status
from hf import leaf_gradients, make_hf, random_like, randomise
from judging import NUDGES, Results, assert_all_close, judge
from torch import nn

import fastbert
from fastbert import BackendError, EncoderConfig
from fastbert.families import FAMILIES
from fastbert.models.auto import model_class

MODES = ("no_grad", "inference_mode", "grad", "backward", *TRANSFORMS)
BACKENDS = ("auto", "torch", "cpu")
Outputs = dict[str, torch.Tensor]


@dataclass
class Batch:
    ids: torch.Tensor
    mask: torch.Tensor  # bool
    types: torch.Tensor


def make_subject(draw: Draw, name: str) -> Subject:
    model_type, is_ours = draw.choice(PLAIN), draw.flag()
    heads = draw.choice((2, 1, 4))
    fields = {
        "num_attention_heads": heads, "hidden_size": heads * draw.choice((8, 16, 12)), "vocab_size": 29,
        "num_hidden_layers": draw.choice((2, 1, 3)), "intermediate_size": draw.choice((24, 64)),
        "max_position_embeddings": 24, "hidden_act": draw.choice(("gelu", "gelu_new", "silu")), "pad_token_id": 0,
    }  # fmt: skip
    if model_type in ("albert", "electra"):
        fields["embedding_size"] = draw.choice((8, fields["hidden_size"]))
    if model_type == "albert" and draw.flag():
        fields |= {"num_hidden_groups": fields["num_hidden_layers"], "inner_group_num": draw.choice((1, 2))}
    fixed = FAMILIES[model_type].fixed
    fields = {name: value for name, value in fields.items() if name not in fixed}
    dropouts = {name: 0.0 for name in ("hidden_dropout_prob", "attention_probs_dropout_prob") if name not in fixed}
    config = EncoderConfig.of_family(model_type, **fields, **dropouts)
    seed = draw.integer(0, 99)
    draw.note(f"{name}: {'our' if is_ours else 'accelerated'} {model_type} {fields}")
    if is_ours:
        model = randomise(model_class(model_type, "Model")(config), seed)
    else:
        plain = make_hf(config, "Model", seed=seed)
        is_strange = draw.flag(4) and "attribute" not in draw.without
        if is_strange:
            draw.doing = "attribute"
            draw_attribute(draw, plain)
        try:
            model = fastbert.accelerate(plain)
        except ValueError as error:  # which is right for most values: the model is then as it should be
            assert is_strange, error
            draw.note(f"  refused: {error}")
            model, is_strange = fastbert.accelerate(make_hf(config, "Model", seed=seed)), False
    return Subject(name, model.eval(), is_ours, is_strange=not is_ours and is_strange)


def make_batch(draw: Draw, subject: Subject) -> Batch:
    """Padded on the right; ids that the tables have now."""
    names = subject.config.embeddings
    tables = [at(subject.model, path) for path in (names.word, names.token_type) if path is not None]
    generator = torch.Generator().manual_seed(draw.seed())
    lengths = torch.tensor([draw.choice((5, 1, 2, 9, 17)) for _ in range(draw.integer(1, 3))])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids, types = (
        torch.randint(0, t.num_embeddings, mask.shape, generator=generator) if t else torch.zeros_like(mask).long()
        for t in (*tables, None)[:2]
    )
    return Batch(ids, mask, types)


def call(subject: Subject, model, batch: Batch) -> Outputs:
    has_types = subject.config.embeddings.token_type is not None
    types = {"token_type_ids": batch.types} if has_types else {}
    options = {"attention_mask": batch.mask.long(), **types}
    if model is subject.model and subject.replaced is not None:
        out = torch.func.functional_call(model, subject.replaced, batch.ids, options)
    else:
        out = model(batch.ids, **options)
    return {name: out[name] for name in ("last_hidden_state", "pooler_output") if out.get(name) is not None}


def truth(subject: Subject, model: nn.Module, batch: Batch) -> Outputs:
    if subject.is_ours:
        return literal_forward(model, batch.ids, batch.mask, batch.types)
    replaced = model.__dict__.pop("forward")
    try:
        return call(subject, model, batch)
    finally:
        model.forward = replaced


def backward(model: nn.Module, outputs: Outputs, batch: Batch) -> Outputs:
    """Gradients of a scalar made of the outputs, a tensor a leaf."""
    model.zero_grad()
    scalar = scalar_of(outputs, batch)
    if not scalar.requires_grad:
        return {}
    scalar.backward()
    return leaf_gradients({name: p.grad for name, p in model.named_parameters(remove_duplicate=False)})


def scalar_of(outputs: Outputs, batch: Batch) -> torch.Tensor:
    real = real_values(outputs, batch).values()
    return torch.stack([(t * random_like(t.shape, i).to(t.dtype)).sum() for i, t in enumerate(real)]).sum()


def real_values(outputs: Outputs, batch: Batch) -> Outputs:
    return {name: t[batch.mask] if name == "last_hidden_state" else t for name, t in outputs.items()}


def runs_in_transformers(subject: Subject, batch: Batch) -> bool:
    with torch.no_grad():
        try:
            truth(subject, copy.deepcopy(subject.model), batch)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return False
    return True


def modes_of(subject: Subject) -> Sequence[str]:
    modes = MODES[:2] if subject.is_inference else MODES[:3] if subject.replaced is not None else MODES
    if subject.is_untold and not subject.is_inference:
        return [mode for mode in modes if mode != "inference_mode"]
    return modes


def run_and_compare(draw: Draw, subject: Subject, batch: Batch) -> None:
    is_replaced = subject.replaced is not None
    mode, backend = draw.choice(modes_of(subject)), draw.choice(BACKENDS)
    is_plain = not is_replaced and mode not in TRANSFORMS
    is_compiled = subject.compiled is not None and draw.flag() and is_plain
    is_plain &= not is_compiled
    in_threads = draw.flag(6) and is_plain  # torch does not promise that
    is_wrapped = draw.flag(6) and is_plain and not in_threads and mode != "inference_mode"
    is_wrapped &= not subject.is_inference  # DDP asks each tensor for its version, which inference tensors have not
    wrapper = WRAPPERS[draw.choice(WRAPPERS)] if is_wrapped else nullcontext
    how = f"{', compiled' * is_compiled}{', in threads' * in_threads}{f', {wrapper.__name__}' * is_wrapped}"
    draw.note(f"run: {subject.name}, {mode}, {backend}{how}")
    model = subject.model
    if subject.is_strange and not runs_in_transformers(subject, batch):
        draw.note("  which transformers itself fails on")
        return
    hooks, before = hooks_of(model), calls_of(subject)
    for each in (hook for found in hooks.values() for hook in found):
        each.calls = 0

    def run(called=subject.compiled if is_compiled else model) -> Outputs:
        contexts = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
        # Compiled calls look for hooks that came later where torch is told to guard them (docs/differences.md).
        guarded = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False) if is_compiled else nullcontext()
        with contexts.get(mode, nullcontext)(), guarded:
            return call(subject, called, batch)

    gradients: Outputs = {}
    try:
        with nullcontext() if backend == "auto" else fastbert.use_backend(backend):
            if in_threads:
                with ThreadPoolExecutor(2) as pool:
                    actual, again = (future.result() for future in [pool.submit(run) for _ in range(2)])
                for name, t in actual.items():
                    assert torch.equal(t, again[name]), f"{name}: two threads, two results"
                gradients = backward(model, actual, batch) if mode == "backward" else {}
            elif mode in TRANSFORMS:
                actual, gradients = transformed(subject, mode, model, run, batch)
            else:
                with wrapper(model) as wrapped:
                    actual = run(wrapped) if is_wrapped else run()
                    gradients = backward(model, actual, batch) if mode == "backward" else {}
                    if is_wrapped:
                        assert_same_status(subject, wrapped)
    except BackendError as error:
        draw.note(f"  not served: {error}")
        return
    except ValueError as error:
        if subject.may_refuse and str(error):
            draw.note(f"  refused: {error}")
            return
        raise
    counted = calls_of(subject) - before
    assert counted == 1 + in_threads or is_compiled, f"status counted {counted} calls"
    silent = [path for path, found in hooks.items() if any(hook.calls == 0 for hook in found)]

    def results_of(number: int) -> Results:
        if number == 0:
            return compared(subject, batch, actual, gradients, mode)
        each = nudged_copy(subject, number)
        return compared(each, batch, *answers(each, mode, each.model, lambda m: call(each, m, batch), batch), mode)

    with torch.inference_mode(subject.is_inference):
        judge(results_of, assert_all_close, NUDGES)
    assert not silent, f"hooks that never fired: {silent}"


def transformed(subject: Subject, mode: str, model: nn.Module, run: Callable, batch: Batch) -> tuple[Outputs, Outputs]:
    outputs, found = TRANSFORMS[mode](model, run, lambda outputs: scalar_of(outputs, batch))
    return outputs, real_values(found, batch) if mode == "forward_mode" else leaf_gradients(found)


def answers(subject: Subject, mode: str, model: nn.Module, run: Callable, batch: Batch) -> tuple[Outputs, Outputs]:
    """The outputs that `run(model)` gives in this mode, and the gradients."""
    if mode in TRANSFORMS:
        return transformed(subject, mode, model, run, batch)
    with nullcontext() if mode == "backward" else torch.no_grad():
        outputs = run(model)
    return outputs, backward(model, outputs, batch) if mode == "backward" else {}


def compared(subject: Subject, batch: Batch, actual: Outputs, gradients: Outputs, mode: str) -> Results:
    """What the error rule takes: these outputs and gradients, and those of the same tree run leaf by leaf."""
    baseline_model = copy.deepcopy(subject.model)
    if subject.replaced is not None:
        baseline_model.load_state_dict(subject.replaced, strict=False)
    exact_model, dtype = copy.deepcopy(baseline_model).double(), next(baseline_model.parameters()).dtype
    if dtype is torch.float64:  # there is nothing more exact to judge it by: fp32 then says what an error may be
        dtype, baseline_model = torch.float32, baseline_model.float()
    found = [(actual, gradients)]
    for model in (exact_model, baseline_model):
        found.append(answers(subject, mode, model, lambda m: truth(subject, m, batch), batch))
    named = [
        {**real_values(outputs, batch), **{f"gradient of {leaf}": t for leaf, t in of_leaves.items()}}
        for outputs, of_leaves in found
    ]
    assert set(named[0]) == set(named[1])
    return {name: t.to(dtype) for name, t in named[0].items()}, *named[1:]


def run_case(draw: Draw) -> None:
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch._dynamo.reset()
    torch.manual_seed(0)
    looks = draw.flag(8)  # collecting takes half a second
    models = run_steps(draw)
    if looks and not draw.has_compiled:
        draw.doing = "dropped"
        gc.collect()
        kept = [type(model()).__name__ for model in models if model() is not None]
        assert not kept, f"models that are not held any more are not freed: {kept}"


def run_steps(draw: Draw) -> list[weakref.ref[nn.Module]]:
    """The models that they were run on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a tree runs on a slower path is said there
        subjects = [make_subject(draw, "a")]
        if draw.flag(3):
            twin = replace(subjects[0], name="b", model=copy.deepcopy(subjects[0].model))
            subjects.append(randomised(draw, twin) if draw.flag() else make_subject(draw, "b"))
        if draw.flag(8) and "compiled" not in draw.without:
            draw.note("all are compiled")
            for each in subjects:
                STEPS["compiled"](draw, each)
        models = [weakref.ref(subject.model) for subject in subjects]
        for _ in range(draw.integer(1, 6)):
            subject = draw.choice(subjects)
            step = draw.choice(STEPS)
            draw.doing = step
            draw.note(f"{step}: {subject.name}")
            with torch.inference_mode(subject.is_inference):
                STEPS[step](draw, subject)
            for each in subjects:
                run_and_compare(draw, each, make_batch(draw, each))
            subject.replaced = None
    return models


def randomised(draw: Draw, subject: Subject) -> Subject:
    draw.note("b: a copy of a with other weights")
    randomise(subject.model, draw.integer(100, 199))
    return subject


FUZZER = Fuzzer("models", run_case, cases=30)
