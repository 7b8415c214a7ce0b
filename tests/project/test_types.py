"""What type checkers and editors see: every public name, wrong names as errors, examples under --strict."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastbert

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/sentences.md", "docs/training.md")
EXAMPLES = [
    block
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
]
ARRAY, TENSOR = "numpy.ndarray[tuple[Any, ...], numpy.dtype[Any]]", "torch._tensor.Tensor"
TENSORS = f"{TENSOR} | list[{TENSOR}]"
KINDS = {
    "fastbert.AutoModel.from_pretrained('x')": "fastbert.models.base.EncoderModel",
    "fastbert.AutoModelForMaskedLM.from_pretrained('x')": "fastbert.models.masked_lm.ForMaskedLM",
    "fastbert.BertModel.from_pretrained('x')": "fastbert.models.classes.BertModel",
    "fastbert.accelerate(torch.nn.Linear(1, 1))": "torch.nn.modules.linear.Linear",
    "fastbert.restore(torch.nn.Linear(1, 1))": "torch.nn.modules.linear.Linear",
    "fastbert.EncoderConfig().hidden_size": "int",
    "fastbert.pack_inputs([[1]])": "fastbert.packed_inputs.PackedInputs",
    "fastbert.SentenceEncoder('x').encode('a')": ARRAY,
    "fastbert.SentenceEncoder('x').encode(['a'], 'query', batch_size=2, precision='int8')": ARRAY,
    "fastbert.SentenceEncoder('x').encode(['a'], convert_to_tensor=True, normalize_embeddings=True)": TENSOR,
    "fastbert.SentenceEncoder('x').encode(['a'], convert_to_numpy=False)": TENSORS,
    "fastbert.SentenceEncoder('x').encode(['a'], output_value='token_embeddings')": TENSORS,
    "fastbert.SentenceEncoder('x').encode(['a'], output_value=None)": "dict[str, Any] | list[dict[str, Any]]",
    "fastbert.SentenceEncoder('x').encode(['a'], convert_to_tensor=bool(input()))": "Any",
    "fastbert.SentenceEncoder('x').encode_query('a', convert_to_tensor=True)": TENSOR,
    "fastbert.SentenceEncoder('x').encode_document(['a'])": ARRAY,
    "fastbert.SparseEncoder('x').encode(['a'])": TENSOR,
    "fastbert.SparseEncoder('x').encode_query(['a'], convert_to_tensor=False)": TENSORS,
    "fastbert.Reranker('x').predict([('a', 'b')])": ARRAY,
    "fastbert.Reranker('x').predict([('a', 'b')], convert_to_tensor=True)": TENSOR,
    "fastbert.Reranker('x').predict([('a', 'b')], convert_to_numpy=False)": TENSORS,
    "fastbert.TextClassifier('x').predict('a')": ARRAY,
}
WRONG = ("fastbert.AutoModl", "fastbert.BertForEverything", "fastbert.encode", "from fastbert import nonsense")
WRONG_CALLS = (
    "fastbert.SentenceEncoder('x').encode(['a'], normalise=True)",
    "fastbert.SentenceEncoder('x').encode(3)",
    "fastbert.SparseEncoder('x').encode(['a'], precision='int8')",
    "fastbert.Reranker('x').predict([('a', 'b')], aggregate='median')",
)


def test_type_checkers_see_what_there_is():
    """The imports under TYPE_CHECKING are those that `_MODULES` makes when a name is used."""
    tree = ast.parse((ROOT / "fastbert" / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [
        node for node in block.body if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fast")
    ]
    seen = {alias.asname: node.module for node in imports for alias in node.names if alias.name != "*"}
    assert seen == fastbert._HOME
    assert [node.module for node in imports if node.names[0].name == "*"] == ["fastbert.models.classes"]


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict[str, list[str]]:
    """mypy --strict over each example of some pages and the lines above: its messages by file."""
    folder = tmp_path_factory.mktemp("typed")
    for i, block in enumerate(EXAMPLES):
        (folder / f"example_{i}.py").write_text(block, encoding="utf-8")
    kinds = [f"reveal_type({expression})" for expression in KINDS]
    (folder / "kinds.py").write_text("\n".join(["import fastbert, torch", *kinds, ""]))
    (folder / "wrong.py").write_text("\n".join(["import fastbert", *WRONG, ""]))
    (folder / "calls.py").write_text("\n".join(["import fastbert", *WRONG_CALLS, ""]))
    # What is inside of transformers is not looked at: that would take minutes, and is not ours.
    settings = "[mypy]\nstrict = true\n[mypy-transformers.*]\nfollow_imports = skip\n"
    settings += "[mypy-fastbert.kernels.*,fastbert._C]\nfollow_imports = skip\nignore_missing_imports = true\n"
    settings += "[mypy-keybert.*]\nignore_missing_imports = true\n"
    (folder / "mypy.ini").write_text(settings)
    files = sorted(path.name for path in folder.glob("*.py"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-error-summary", *files],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )
    assert not done.stderr, done.stderr
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        found.setdefault(Path(line.split(":")[0]).name, []).append(line)
    return found


@pytest.mark.full
def test_the_examples_pass(report):
    assert len(EXAMPLES) >= 5
    assert not [line for name, lines in report.items() if name.startswith("example_") for line in lines]


@pytest.mark.full
def test_what_is_made_has_a_type(report):
    revealed = [re.search(r'Revealed type is "([^"]+)"', line) for line in report["kinds.py"]]
    assert [found and found[1].replace("builtins.", "") for found in revealed] == list(KINDS.values())


@pytest.mark.full
def test_a_wrong_name_is_an_error(report):
    errors = [line for line in report["wrong.py"] if " error: " in line]
    assert [int(line.split(":")[1]) for line in errors] == list(range(2, 2 + len(WRONG))), errors
    assert all("attr-defined" in line for line in errors)


@pytest.mark.full
def test_a_wrong_argument_is_an_error(report):
    errors = [line for line in report["calls.py"] if "[call-overload]" in line]
    assert sorted({int(line.split(":")[1]) for line in errors}) == list(range(2, 2 + len(WRONG_CALLS))), errors
