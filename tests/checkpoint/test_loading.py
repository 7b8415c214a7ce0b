"""What loading and running a model imports: not torch._dynamo, which takes 1.2 s, four times as long as all else; nor
sympy.
"""

from __future__ import annotations

import sys
import textwrap

import pytest
import tiny
import torch
import warm
from kinds import ONE_OF_EACH
from safetensors.torch import load_file, save_file

from fastbert import AutoModel
from fastbert.families import FAMILIES

# Runs in a process of its own; `step` names what has imported it. An optimizer is not here: torch's own import it.
PROGRAM = """
    import sys, tempfile, warnings
    import torch, fastbert
    from fastbert.cli import main
    from fastbert.models.auto import model_classes

    warnings.simplefilter("ignore")  # of heads that are not in the checkpoint

    def step(name, value=None):
        for module in ("torch._dynamo", "sympy"):
            assert module not in sys.modules, f"{name} imported {module}"
        return value

    def forward_and_backward(name, model):
        ids = torch.tensor([[2, 9, 11, 8, 3], [2, 10, 3, 0, 0]])
        shape = (1, 2, 5) if "MultipleChoice" in name else (2, 5)
        arguments = {"input_ids": ids.view(shape), "attention_mask": (ids != 0).long().view(shape)}
        with torch.no_grad():
            step(f"{name}, eval", model(**arguments))
        outputs = step(f"{name}, train", model.train()(**arguments)).to_tuple()
        sum(t.sum() for t in outputs if t.requires_grad).backward()
        step(f"{name}, backward")

    for model_type, folder in FOLDERS.items():
        for name, kind in model_classes(model_type).items():
            model = step(f"{name}, loading", kind.from_pretrained(folder))
            forward_and_backward(name, model)
            step(f"{name}, making", kind(model.config))
        int8 = tempfile.mkdtemp()
        model = step("quantize", fastbert.quantize(fastbert.AutoModel.from_pretrained(folder)))
        model.save_pretrained(int8)
        step("save_pretrained")
        step("loading int8", fastbert.AutoModel.from_pretrained(int8))(torch.tensor([[2, 9, 3]]))
        step("an int8 forward")
    for source in ENCODERS:
        encoder = step(f"loading {source}", fastbert.SentenceEncoder.from_pretrained(source, device="cpu"))
        step(f"encoding by {source}", encoder.encode(["a cat sat on a mat", "the dog"]))
    main(["info", folder])
    step("fastbert info")
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "families",
    (
        pytest.param(sorted(ONE_OF_EACH), id="of each kind"),
        pytest.param(sorted({"bert", *FAMILIES} - ONE_OF_EACH), id="others", marks=pytest.mark.full),
    ),
)
def test_loading_and_running_a_model_imports_no_compiler(tmp_path, families):
    folders = {family: str(tiny.write_model(tmp_path / family, model_type=family)) for family in families}
    dense = tiny.write_model(tmp_path / "dense")
    tiny.write_modules(dense, "Pooling", "Dense")
    tiny.write_json(dense / "1_Pooling/config.json", {"word_embedding_dimension": 32})
    tiny.write_json(dense / "2_Dense/config.json", {"in_features": 32, "out_features": 12, "bias": True})
    save_file(
        {"linear.weight": torch.zeros(12, 32), "linear.bias": torch.zeros(12)}, dense / "2_Dense/model.safetensors"
    )
    given = f"FOLDERS, ENCODERS = {folders!r}, {[folders[families[-1]], str(dense)]!r}"
    done = warm.run([sys.executable, "-c", f"{given}\n{textwrap.dedent(PROGRAM)}"])
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_weights_may_be_finite_where_their_sum_is_not(tmp_path, dtype):
    """Loading looks for values that are not finite in the sum first."""
    folder = tiny.write_model(tmp_path)
    weights = {key: t.to(dtype) for key, t in load_file(folder / "model.safetensors").items()}
    weights["embeddings.position_embeddings.weight"].fill_(torch.finfo(dtype).max)
    save_file(weights, folder / "model.safetensors")
    loaded = AutoModel.from_pretrained(folder)
    assert (loaded.embeddings.position_embeddings.weight == torch.finfo(dtype).max).all()
