"""A few cases of each fuzzer, always the same ones: that they run at all, and find nothing, from commit to commit."""

from __future__ import annotations

import json
import random
import runpy
import subprocess
import sys

import fuzz_cli
import fuzz_configs
import fuzz_files
import fuzz_isas
import fuzz_models
import fuzz_ops
import fuzz_optimizer
import pytest
import torch
from draw import Draw
from family_configs import make_config
from fuzz_damage import ODD_VALUES, mutate
from fuzz_driver import run_round
from hf import families_axis, make_hf, make_oracle
from kinds import of_every_kind
from op_case import Case

from fastbert.testing import reference

CASES = {
    fuzz_files.FUZZER: 6,
    fuzz_configs.FUZZER: 3,
    fuzz_models.FUZZER: 3,
    fuzz_ops.FUZZER: 12,
    fuzz_optimizer.FUZZER: 10,
    fuzz_isas.FUZZER: 1,
}


@pytest.mark.parametrize("fuzzer", CASES, ids=lambda fuzzer: fuzzer.name)
def test_a_few_cases(fuzzer):
    done = run_round(
        fuzzer, seed=0, cases=CASES[fuzzer], without=("compiled",)
    )  # torch's compiler takes seconds to import
    assert done.finding is None, done.finding.text
    assert done.cases >= CASES[fuzzer]


# `python -m fastbert --help` that gets a Ctrl-C when it begins to import a module.
INTERRUPTED = """
import runpy, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
sys.argv[1:] = [sys.argv[1], "--help"]
runpy.run_module("fastbert", run_name="__main__")
"""


@pytest.mark.parametrize("module", ("fastbert.cli", "fastbert.__main__", "signal"))
def test_an_interrupt_before_main_is_no_finding(module):
    """signal: main imports it, and catches what comes."""
    command = [sys.executable, "-c", INTERRUPTED, module]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=fuzz_cli.ENVIRONMENT)
    code, errors = fuzz_cli.finish(process, was_interrupted=True)
    assert fuzz_cli.is_before_main(errors) == (code != 130) == (module != "signal")


def test_any_other_traceback_is_a_finding():
    frame = f'  File "{fuzz_cli.ROOT}/fastbert/__main__.py", line 5, in <module>\n    from fastbert.cli import main\n'
    before = f"Traceback (most recent call last):\n{frame}KeyboardInterrupt\n"
    assert fuzz_cli.is_before_main(before)
    for other in (
        before.replace("KeyboardInterrupt", "ValueError: KeyboardInterrupt 1"),
        before.replace("from fastbert.cli import main", "sys.exit(main())"),
        before.replace("<module>", "run"),
        before + "During handling of the above exception, another exception occurred:\n\n" + before,
    ):
        assert not fuzz_cli.is_before_main(other)


def test_a_leak_is_told_from_caches_that_fill_up():
    """400 MB a process of 240 rounds, then slower: what was seen of libraries; 8 MB a round: a leak."""
    driver = runpy.run_path(str(fuzz_cli.ROOT / "tests/fuzz/__main__.py"))
    filling = [round(4.1e8 + 1.1e9 * (1 - 0.99**i)) for i in range(662)]
    assert driver["growth"](filling) == driver["growth"]([]) == driver["growth"](filling[:1]) == ""
    assert driver["growth"]([size + 8_000_000 * i for i, size in enumerate(filling)]).startswith("from ")


def test_damage_leaves_the_table_of_odd_values_as_it_is():
    """Its lists were changed where they had been put, at last put into themselves: a walk over them had no end."""
    before = repr(ODD_VALUES)
    for seed in range(300):
        draw, entries = Draw(random.Random(seed).randint), {"a": 1}
        for _ in range(4):
            entries = mutate(draw, entries)
        json.dumps(entries)
    assert repr(ODD_VALUES) == before


@of_every_kind()
@families_axis
def test_terms_of_keys_biases_are_there_for_every_family(model_type):
    """Of six families, whose attention is no function of transformers', there were none: the rule held by luck."""
    config = make_config(model_type, 0)
    theirs, ids = make_hf(config, "Model"), torch.randint(10, 40, (3, 9))
    inputs = fuzz_isas.Inputs(ids, None, torch.arange(9) < torch.tensor([[9], [4], [1]]), None)
    oracle = fuzz_isas.gradients(make_oracle(theirs), inputs, torch.float64)
    terms, near = fuzz_isas.key_terms(theirs, inputs), fuzz_isas.gradients(theirs, inputs, torch.float32)
    assert len(terms) == config.num_unique_layers
    assert all(0 < float(t) < 1e4 for t in terms.values())
    for name, exact in oracle.items():
        if name.endswith((".key.bias", ".k.bias", ".k_lin.bias")) and exact.abs().max() < 1e-12:
            bound = torch.finfo(torch.float32).eps * terms[f"{name.rpartition('.')[0].rpartition('.')[0]}.terms"]
            assert near[name].abs().max() <= bound, name


def test_a_loss_may_err_by_what_its_logits_are_rounded_by():
    """It is a difference of two of them: of one row, where they are thousands and it is not, one draw tells nothing."""
    labels = torch.tensor([3])

    def exact_but_for_one_rounding(x, weight):
        logits = x.double() @ weight.double().T
        error = torch.finfo(x.dtype).eps / 2 * logits.abs().max()
        return (reference.cross_entropy(x.double(), weight.double(), None, labels) + error).to(x.dtype)

    values = {"x": "few values", "weight": "large mean"}
    shapes = {"x": (1, 64), "weight": (30, 64)}
    formula = lambda x, weight: reference.cross_entropy(x, weight, None, labels)  # noqa: E731
    case = Case(exact_but_for_one_rounding, formula, shapes, torch.bfloat16, {"weight": 64**-0.5}, values)
    with pytest.raises(AssertionError, match="max error"):
        case.compare(0)
    case.differs = lambda x, weight: x @ weight.T
    case.compare(0)
