"""fastbert: BERT-family encoders, packed and fused, as a drop-in for PyTorch and Hugging Face users.

All public names are here. They are imported when they are first used: `import fastbert` then takes little longer than
`import torch`, and imports no optional part (the C++ extension, Triton, transformers).
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing's own would cost more than the rest: the command line starts with this file
if TYPE_CHECKING:
    from typing import Any

    from fastbert.models.classes import *  # noqa: F403

__version__ = "0.1.0"

_MODULES: dict[str, tuple[str, ...]] = {
    "fastbert.models.auto": (
        "AutoModel",
        *(
            f"AutoModelFor{head}"
            for head in (
                "MaskedLM",
                "PreTraining",
                "NextSentencePrediction",
                "SequenceClassification",
                "TokenClassification",
                "QuestionAnswering",
                "MultipleChoice",
            )
        ),
    ),
    "fastbert.models.baby": ("baby_config",),
    "fastbert.models.joint_electra": ("ElectraForJointPreTraining",),
    "fastbert.acceleration": ("accelerate", "restore"),
    "fastbert.bulk.ray_engine": ("ray_encode",),
    "fastbert.backend": ("Backend", "BackendError", "backends", "use_backend"),
    "fastbert.config": ("ConfigError", "EncoderConfig"),
    "fastbert.cuda_graphs": ("graphs",),
    "fastbert.checkpoint.weight_files": ("CheckpointError",),
    "fastbert.master_weights": ("MasterWeights",),
    "fastbert.packed_inputs": ("PackedInputs", "pack_inputs"),
    "fastbert.packed_weights": ("repack",),
    "fastbert.packing": ("InputError", "PackedBatch", "check_inputs"),
    "fastbert.quantization": ("quantization_error", "quantize"),
    "fastbert.sentences": ("Reranker", "SentenceEncoder"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def from_pretrained(name_or_path: str, **options: Any) -> Any:
    """Load an encoder from a folder, a hub id or a packaged model, as `AutoModel.from_pretrained` does."""
    from fastbert.models.auto import AutoModel

    return AutoModel.from_pretrained(name_or_path, **options)


# Modules that had another name in 0.1.
_MOVED = {
    "_saving": "checkpoint.saving",
    "_weight_files": "checkpoint.weight_files",
    "accelerate": "acceleration",
    "cli.commands": "cli.run",
    "graphs": "cuda_graphs",
    "hub": "checkpoint.pretrained",
    "sentence_folder": "data.sentence_folder",
    "tokenization": "data.tokenization",
    "testing.bench": "bench.timing",
    "models.family": "models.tree",
    **{f"models.{name}": "models.classes" for name in ("albert", "bert", "distilbert", "electra", "roberta")},
    **{f"testing.{name}": f"bench.{name}" for name in ("compete", "contestants", "jobs", "report", "runtimes")},
}


class _MovedModules:
    """The last finder of sys.meta_path: importing a module by its old name fails with the new one."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        package, _, rest = name.partition(".")
        if package == __name__ and rest in _MOVED:
            # Without `name=`, or `from fastbert import hub` would hide this message behind one of its own.
            raise ModuleNotFoundError(f"{name} has moved: it is {package}.{_MOVED[rest]} now")


sys.meta_path.append(_MovedModules)


def _public_names() -> list[str]:
    """All of them; the model classes are those that the families' data ask for (families/)."""
    from fastbert.families import FAMILIES

    classes = [
        f"{family.classes}{end}"
        for family in FAMILIES.values()
        for end in ("Model", *(f"For{head}" for head in family.heads))
    ]
    return ["__version__", "from_pretrained", *_HOME, *classes]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "__all__":
        return _public_names()
    if name in _HOME:
        home = import_module(_HOME[name])
        globals().update({sibling: getattr(home, sibling) for sibling in _MODULES[_HOME[name]]})
        return globals()[name]
    if not name.startswith("_") and name in _public_names():
        return getattr(import_module("fastbert.models.classes"), name)
    raise AttributeError(f"module 'fastbert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_public_names())
