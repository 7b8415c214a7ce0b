"""fastbert: BERT-family encoders, packed and fused, as a drop-in for PyTorch and Hugging Face users.

Everything public is here. Names are imported when they are first used, so that `import fastbert` costs little more than
`import torch`, and no optional backend (the C++ extension, Triton, transformers) is touched.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own would cost more than the rest: the command line starts with this file
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_HEADS = (
    "MaskedLM",
    "PreTraining",
    "NextSentencePrediction",
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
    "MultipleChoice",
)
_MODULES: dict[str, tuple[str, ...]] = {
    "fastbert.models.auto": ("AutoModel", *(f"AutoModelFor{head}" for head in _HEADS)),
    "fastbert.models.bert": ("BertModel", *(f"BertFor{head}" for head in _HEADS)),
    "fastbert.models.baby": ("baby_config", "MegatronBertModel", *(f"MegatronBertFor{head}" for head in _HEADS)),
    "fastbert.models.roberta": tuple(
        f"{family}{part}"
        for family in ("Roberta", "XLMRoberta")
        for part in ("Model", *(f"For{head}" for head in (_HEADS[0], *_HEADS[3:])))
    ),
    "fastbert.models.distilbert": (
        "DistilBertModel",
        *(f"DistilBertFor{head}" for head in (_HEADS[0], *_HEADS[3:])),
    ),
    "fastbert.models.albert": ("AlbertModel", *(f"AlbertFor{head}" for head in (*_HEADS[:2], *_HEADS[3:]))),
    "fastbert.models.electra": (
        "ElectraModel",
        "ElectraForJointPreTraining",
        *(f"ElectraFor{head}" for head in (*_HEADS[:2], *_HEADS[3:])),
    ),
    "fastbert.accelerate": ("accelerate", "restore"),
    "fastbert.backend": ("Backend", "BackendError", "backends", "use_backend"),
    "fastbert.config": ("ConfigError", "EncoderConfig"),
    "fastbert.graphs": ("graphs",),
    "fastbert.hub": ("CheckpointError",),
    "fastbert.master_weights": ("MasterWeights",),
    "fastbert.packed_weights": ("repack",),
    "fastbert.packing": ("InputError", "PackedBatch", "check_inputs"),
    "fastbert.quantization": ("quantization_error", "quantize"),
    "fastbert.sentences": ("SentenceEncoder",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", "from_pretrained", *_HOME]


def from_pretrained(name_or_path: str, **options: Any) -> Any:
    """The encoder of a folder, hub id or packaged model: `AutoModel.from_pretrained`."""
    from fastbert.models.auto import AutoModel

    return AutoModel.from_pretrained(name_or_path, **options)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fastbert' has no attribute {name!r}")
    from importlib import import_module

    home = import_module(_HOME[name])
    globals().update({sibling: getattr(home, sibling) for sibling in _MODULES[_HOME[name]]})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
