"""What the package does in one place only, looked for in its text."""

from __future__ import annotations

import re
from pathlib import Path

from fastbert.ops.layers.layer_numbers import HEADER, header

PACKAGE = Path(__file__).parents[2] / "fastbert"


def files_with(pattern: str) -> set[str]:
    """The package's files with a line of code that has it."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        if any(re.search(pattern, line.partition("#")[0]) for line in path.read_text(encoding="utf-8").splitlines()):
            found.add(str(path.relative_to(PACKAGE)))
    return found


def test_one_place_renames_what_was_written_beside():
    assert files_with(r"\bos\.(replace|rename|link)\(|\bfsync\(|mkstemp|NamedTemporaryFile") == {"files.py"}


def test_one_place_cuts_batches_by_a_number_of_tokens():
    assert files_with(r"def token_batches\(|\"cuda\": 16384") == {"data/budget.py"}
    assert not files_with(r"sorted\(.*key=lambda i: -lengths") and not files_with(r"argsort\(-lengths")


def test_one_way_leads_from_texts_to_a_models_batches():
    """A corpus is tokenised into a file, what is cut into windows without a limit, and what /tokenize tells with the
    places of tokens; of a long text it is looked how far it is needed. `run_batches` runs batches of
    texts; inspect runs the same texts many times, with gradients or with tokens masked; a benchmark draws its tokens,
    and runs other engines as their users do.
    """
    tokenising = {"data/long_texts/pairs.py", "data/pretraining/corpus.py", "data/chunks/__init__.py"}
    tokenising |= {"bench/texts/contestants.py", "data/long_texts/pieces.py", "serve/routes/token_ids.py"}
    assert files_with(r"\.encode_batch(_fast)?\b") == tokenising
    many_times = {"inspect/attribution.py", "inspect/likelihood.py", "bench/comparison.py"}
    assert files_with(r"\btoken_batches\(") == {"data/budget.py", "data/tokenized.py", *many_times}
    own = {"data/tokenized.py", "data/chunks/job.py", "sentences/documents.py", "sentences/text_model.py"}
    assert files_with(r"\brun_batches\(") == own | {"training/finetuning/classification.py"}
    assert files_with(r"\.sigmoid\(\) if") == {"sentences/scorer.py"}  # labels' probabilities


def test_one_record_says_what_a_model_is_given():
    assert files_with(r"class ModelInputs\(") == {"packed_inputs.py"}
    assert not files_with(r"\bprepare(_inputs)?\(\*")


def test_one_description_of_a_layer():
    """And one place with the order in which C++ reads its numbers."""
    assert files_with(r"\bnum_kv_heads: int$") == {"layer_spec.py", "ops/layers/layer_numbers.py"}
    assert HEADER.read_text(encoding="utf-8") == header(), "write it anew: call fastbert.ops.layers.layer_numbers.write"
    assert not [path for path in HEADER.parent.glob("*.cpp") if re.search(r"\b(ints|floats)\[\d", path.read_text())]
