"""What importing fastbert costs and touches, in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import warm
from full import left_to_full

from fastbert.backend import BUILD_KERNELS

PACKAGE = Path(__file__).parents[2] / "fastbert"

SLOW = "models run several times slower on CPUs; with a C++ compiler, this builds it: "

FORWARD_AND_BACKWARD = """
    import torch, fastbert
    model = fastbert.BertForMaskedLM(fastbert.EncoderConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64))
    ids = torch.randint(0, 50, (2, 7))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    out = model(ids, mask, labels=ids.where(mask == 1, -100))
    out.loss.backward()
    assert torch.isfinite(out.loss) and all(torch.isfinite(p.grad).all() for p in model.parameters())
"""


def finish(program: str, **environment: str) -> subprocess.CompletedProcess:
    """With torch already imported."""
    done = warm.run([sys.executable, "-c", textwrap.dedent(program)], env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def run_cold(program: str) -> str:
    """Of what it imports nothing is there."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def run(program: str, **environment: str) -> str:
    return finish(program, **environment).stdout


def warnings_of(program: str, **environment: str) -> list[str]:
    """The lines in which a program warned of something of ours."""
    return [line for line in finish(program, **environment).stderr.splitlines() if "Warning: fastbert: " in line]


EVERY_PART = "transformers triton fastbert._C"


@left_to_full(lambda p: p["blocked"] in ("transformers", "triton", EVERY_PART))  # one by one, and all: others' paths
@pytest.mark.parametrize("blocked", ("transformers", "triton", "transformers triton", "fastbert._C", EVERY_PART))
def test_works_without_optional_parts(blocked):
    block = f"""
        import sys
        for name in {blocked.split()!r}:
            sys.modules[name] = None  # import of it raises ImportError
    """
    run(textwrap.dedent(block) + textwrap.dedent(FORWARD_AND_BACKWARD))


def test_import_touches_no_optional_part():
    run("""
        import sys, fastbert
        fastbert.AutoModel, fastbert.use_backend, fastbert.SentenceEncoder
        for name in ("transformers", "triton", "fastbert._C", "torch._dynamo"):
            assert name not in sys.modules, name
    """)


def test_import_is_cheap():
    """What a quiet machine does in under 0.15 s on top of torch's own (docs/design.md), by what does not depend on the
    machine: which packages come along, and how many Python functions are called beside those of the import system
    (which grow with `sys.path` and shrink where bytecode is not kept) and of `inspect` (torch.library looks through all
    modules that are loaded). Of 20,700 a third each are dataclasses' and typing's; a family adds 170.
    """
    calls, packages = run_cold("""
        import sys, torch
        before, calls = set(sys.modules), 0
        def count(frame, event, argument):
            global calls
            path = frame.f_code.co_filename
            calls += event == "call" and not path.startswith("<frozen ") and not path.endswith("inspect.py")
        sys.setprofile(count)
        import fastbert
        fastbert.AutoModel, fastbert.SentenceEncoder, fastbert.accelerate
        sys.setprofile(None)
        new = set(sys.modules) - before
        print(calls, ",".join(sorted({name.split(".")[0] for name in new} - sys.stdlib_module_names)))
    """).split()
    assert int(calls) < 21_000
    assert packages == "fastbert,tokenizers"


def test_the_command_lines_entry_imports_nothing_else():
    """A Ctrl-C before `main` runs ends in a traceback that nothing can catch."""
    run_cold("""
        import sys
        before = set(sys.modules)
        import fastbert.cli
        new = set(sys.modules) - before - {"__future__"}
        assert new == {"fastbert", "fastbert.cli", "fastbert.cli.stopping", "fastbert.version"}, new
    """)


MODELS = """
    import fastbert
    shape = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = fastbert.EncoderConfig(intermediate_size=16, **shape)
"""
WAYS = {
    "our own": "fastbert.BertForMaskedLM(config); fastbert.BertModel(config)",
    "accelerated": "import transformers as t; fastbert.accelerate(t.BertModel(t.BertConfig(**shape)))",
}


@left_to_full(lambda p: p["way"] == "accelerated")  # says it by the same function
@pytest.mark.parametrize("way", WAYS)
def test_an_installation_without_kernels_says_so_once(way):
    blocked = "import sys; sys.modules['fastbert._C'] = None\n"
    said = warnings_of(blocked + textwrap.dedent(MODELS) + 2 * f"{WAYS[way]}\n")
    assert len(said) == 1 and f"is not built (import of fastbert._C halted; None in sys.modules): {SLOW}" in said[0]
    assert said[0].strip().endswith(BUILD_KERNELS)


@pytest.mark.full  # asks as test_cli_build.py's processes do
def test_with_torch_nothing_is_said_of_kernels():
    blocked = "import sys; sys.modules['fastbert._C'] = None\n" + textwrap.dedent(MODELS)
    imports = blocked.replace("shape =", "import fastbert.ops, fastbert.models.auto; shape =")  # nor who imports alone
    assert not warnings_of(imports + "with fastbert.use_backend('torch'): fastbert.BertModel(config)")
    assert not warnings_of(blocked + "fastbert.BertModel(config)", FASTBERT_BACKEND="torch")


def test_an_extension_that_does_not_load_is_told_from_one_that_is_not_there(tmp_path):
    """As one that was built for another torch: its symbols are not found, or the file is none."""
    from importlib.machinery import EXTENSION_SUFFIXES

    (tmp_path / f"_C{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    broken = f"import fastbert; fastbert.__path__.insert(0, {str(tmp_path)!r})\n"
    said = warnings_of(broken + textwrap.dedent(MODELS) + "fastbert.BertModel(config)")
    assert len(said) == 1 and "the C++ extension does not load, build it for this torch (" in said[0]
    assert f"): {SLOW}" in said[0] and said[0].strip().endswith(BUILD_KERNELS)


def test_the_command_that_builds_the_kernels_is_the_docs():
    for page in ("README.md", "docs/install.md"):
        assert f"`{BUILD_KERNELS}`" in (PACKAGE.parent / page).read_text(encoding="utf-8")


def test_families_and_configs_need_no_torch():
    """Nor the package's own __init__. A new family's author needs nothing but Python."""
    run_cold("""
        import sys
        sys.modules["torch"] = None
        import fastbert.families, fastbert.config
        for family in fastbert.families.FAMILIES:
            assert fastbert.config.EncoderConfig.of_family(family).layer_specs
        fastbert.__all__
        found = [name for name, module in sys.modules.items() if name.startswith("torch") and module is not None]
        assert not found, found
    """)
