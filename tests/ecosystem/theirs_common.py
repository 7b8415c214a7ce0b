"""transformers' own tests of every model (tests/test_modeling_common.py of its source distribution) on three routes.

    pip download --no-deps --no-binary :all: transformers==5.24.0     # and unpack it
    pip install parameterized                                         # which their file imports
    python tests/ecosystem/theirs_common.py FOLDER bert deberta-v2    # FOLDER: what was unpacked

Routes: transformers' classes as they are ("plain"), the same accelerated before their first call ("accelerated"),
and fastbert's classes ("own"). What fails on a route and not on "plain" is printed, unless REASONS says why it may; the
exit status is 1 where something was.

The file is imported from where it lies. Of what it imports beside itself, the distribution lacks two files; mixins
without tests stand in for them. The testers of the models are ours: tiny configs and a batch.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import os
import sys
import types
import unittest
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

import torch
import transformers
from family_configs import few_heads
from seeds import manual_seed

import fastbert
from fastbert.config import EncoderConfig
from fastbert.families import FAMILIES
from fastbert.models.classes import CLASSES

ROUTES = ("plain", "accelerated", "own")
# (route, or route and family; test) -> why it may fail there.
REASONS = {
    ("accelerated", "test_can_capture_specific_layers_hidden_states"): (
        "a call that selects hidden states is transformers' own, whose padding is not zero: the test compares padding"
    ),
    ("own", "test_can_load_ignoring_mismatched_shapes"): "a head of another size is an error; ours has no such option",
    ("own", "test_gradient_checkpointing_enable_disable"): "layers are containers of leaves, without such an attribute",
    ("own", "test_peft_gradient_checkpointing_enable_disable"): "the same",
    ("own", "test_can_set_attention_dynamically"): "one implementation of attention serves all names",
    ("own", "test_cannot_load_with_meta_device_context_manager"): "loading inside of a meta device works",
    ("own", "test_keep_in_fp32_modules"): "no module of an encoder is kept in float32",
    ("own", "test_keep_in_fp32_modules_exist"): "the same",
    ("own", "test_training_gradient_checkpointing"): "the test looks for that attribute of layers",
    ("own", "test_training_gradient_checkpointing_use_reentrant_false"): "the same",
    ("own", "test_training_gradient_checkpointing_use_reentrant_true"): "use_reentrant=True is refused",
    ("own", "test_resize_tokens_embeddings"): "a fraction of a row is an error of another text",
    ("own", "test_model_weights_reload_no_missing_tied_weights"): "a folder without the layers' weights is an error",
    ("own", "test_can_init_all_missing_weights"): "the same, of a folder without any",
    ("own", "test_tp_plan_matches_params"): "a model stands on one device: there is no plan of tensor parallelism",
    ("own gemma3_text", "test_bc_torch_dtype"): "float16 is refused: hidden states leave its range",
    ("own", "test_model_rope_scaling_from_config_1_dynamic"): "tables that depend on the longest sequence are refused",
}
_LACKING = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
# Tests that need a GPU, a hub or a decoder, and such as compile for minutes: they ask nothing of an encoder on a CPU.
LEFT_OUT = ("flash_attn", "deepspeed", "_features_", "parallelism", "offload", "moe", "compile", "exporter")


class Tester:
    """What test_modeling_common.py asks of a model's tester."""

    batch_size, seq_length, num_choices, is_training = 5, 7, 4, True

    def __init__(self, family: str, route: str):
        self.family, self.route = family, route
        self.hidden_size = self.num_labels = 0
        config = self.get_config()
        self.hidden_size, self.num_labels = config.hidden_size, config.num_labels
        self.num_hidden_layers, self.num_attention_heads = config.num_hidden_layers, config.num_attention_heads

    def get_config(self) -> transformers.PretrainedConfig:
        """Sizes of transformers' own testers."""
        fields = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        fields |= {"intermediate_size": 37, "max_position_embeddings": 64}
        if EncoderConfig.of_family(self.family).pad_token_id not in range(99):  # ESM's is none
            fields["pad_token_id"] = 1
        fields = few_heads(self.family, fields["hidden_size"], fields["num_attention_heads"]) | fields
        ours = EncoderConfig.of_family(self.family, **fields)
        config = transformers.CONFIG_MAPPING[self.family].from_dict(ours.to_dict())
        config.use_cache = False  # an encoder gives no past_key_values, which the tests would compare
        return config

    def prepare_config_and_inputs_for_common(self) -> tuple[transformers.PretrainedConfig, dict[str, Any]]:
        shape = self.batch_size, self.seq_length
        mask = torch.ones(shape, dtype=torch.long)
        if self.route != "own":  # whose heads refuse labels at padding, which these tests have everywhere
            mask[1:, -2:] = 0
        return self.get_config(), {"input_ids": torch.randint(3, 99, shape), "attention_mask": mask}


def common(folder: Path) -> types.ModuleType:
    """test_modeling_common.py, which lies in `folder`/tests."""
    package = types.ModuleType("theirs_tests")
    package.__path__ = [str(folder / "tests")]
    sys.modules["theirs_tests"] = package
    for module, name in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        parent = types.ModuleType(f"theirs_tests.{module.partition('.')[0]}")
        parent.__path__ = []
        stand_in = types.ModuleType(f"theirs_tests.{module}")
        setattr(stand_in, name, type(name, (), {}))
        sys.modules[parent.__name__], sys.modules[stand_in.__name__] = parent, stand_in
    return importlib.import_module("theirs_tests.test_modeling_common")


def classes_of(family: str, route: str) -> tuple[type, ...]:
    ours = [kind for (model_type, _), kind in CLASSES.items() if model_type == family]
    return tuple(ours if route == "own" else [getattr(transformers, kind.__name__) for kind in ours])


@contextlib.contextmanager
def on(route: str, calls: Counter[str]):
    """Every model of transformers is accelerated when it is called first, and what became of its calls is counted."""
    if route != "accelerated":
        yield
        return
    call = torch.nn.Module.__call__

    @functools.wraps(call)
    def accelerates(module, *args, **kwargs):
        is_theirs = type(module).__module__.startswith("transformers.models.")
        if is_theirs and isinstance(module, transformers.PreTrainedModel) and "_met" not in module.__dict__:
            module.__dict__["_met"] = True
            for child in module.modules():
                child.__dict__["_met"] = True
            with contextlib.suppress(ValueError):
                fastbert.accelerate(module)
                met.append(module)
        return call(module, *args, **kwargs)

    met: list[torch.nn.Module] = []
    torch.nn.Module.__call__ = accelerates
    try:
        yield
    finally:
        torch.nn.Module.__call__ = call
        for module in met:
            status = fastbert.status(module)
            calls["packed"] += status.packed
            calls["others"] += status.others


def run(module: types.ModuleType, family: str, route: str, only: str | None) -> tuple[dict[str, str], Counter[str]]:
    """(what became of each test, what became of the calls of accelerated models)."""

    class Case(module.ModelTesterMixin, unittest.TestCase):
        all_model_classes = classes_of(family, route)
        model_tester = Tester(family, route)

        def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
            """As the families' own tests have it: a pair's label goes with its words'."""
            made = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
            if return_labels and model_class.__name__.endswith("ForPreTraining"):
                made["labels"] = torch.zeros_like(made["input_ids"])
                if family != "electra":
                    name = "sentence_order_label" if family == "albert" else "next_sentence_label"
                    made[name] = torch.zeros(len(made["labels"]), dtype=torch.long)
            return made

    found, calls = dict[str, str](), Counter[str]()
    for name in unittest.TestLoader().getTestCaseNames(Case):
        if any(part in name for part in LEFT_OUT) or (only is not None and only not in name):
            continue
        manual_seed(0)
        result = unittest.TestResult()
        said = io.StringIO()
        with (
            on(route, calls),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            warnings.simplefilter("ignore")
            Case(name).run(result)
        bad = [*result.failures, *result.errors]
        found[name] = "skipped" if result.skipped else "passed" if not bad else bad[0][1].strip().splitlines()[-1]
        if only is not None and bad:
            print(bad[0][1])
    return found, calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("families", nargs="*", default=sorted(FAMILIES))
    parser.add_argument("--only", help="a part of a test's name: it alone, with its traceback")
    options = parser.parse_args()
    module, unknown = common(options.folder), 0
    for family in options.families:
        plain: dict[str, str] = {}
        for route in ROUTES:
            found, calls = run(module, family, route, options.only)
            plain = plain or found
            counts = Counter(what if what in ("passed", "skipped") else "failed" for what in found.values())
            line = ", ".join(f"{counts[what]} {what}" for what in ("passed", "failed", "skipped"))
            print(f"{family:22} {route:12} {line}{f', calls {dict(calls)}' if calls else ''}", flush=True)
            for test, what in found.items():
                if what in ("passed", "skipped") or plain[test] not in ("passed", "skipped"):
                    continue
                if not {(route, test), (f"{route} {family}", test)} & REASONS.keys():
                    unknown += 1
                    print(f"    {test}: {what[:200]}")
    return min(unknown, 1)


if __name__ == "__main__":
    sys.exit(main())
