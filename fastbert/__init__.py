"""fastbert: BERT-family encoders, packed and fused, as a drop-in for PyTorch and Hugging Face users.

All public names are here. They are imported when they are first used: `import fastbert` then takes little longer than
`import torch`, and imports no optional part (the C++ extension, Triton, transformers).
"""

from __future__ import annotations

from fastbert.version import __version__ as __version__

TYPE_CHECKING = False  # typing's own would cost more than the rest: the command line starts with this file
if TYPE_CHECKING:  # what type checkers and editors see; a test compares it with _MODULES
    from typing import Any

    from fastbert.acceleration import accelerate as accelerate
    from fastbert.acceleration import restore as restore
    from fastbert.acceleration.flattening import SentencePackingCollator as SentencePackingCollator
    from fastbert.acceleration.status import status as status
    from fastbert.backend import Backend as Backend
    from fastbert.backend import use_backend as use_backend
    from fastbert.backend_report import backends as backends
    from fastbert.bulk.ray_engine import ray_encode as ray_encode
    from fastbert.config import EncoderConfig as EncoderConfig
    from fastbert.data.chunks import Windows as Windows
    from fastbert.data.collator import PackingCollator as PackingCollator
    from fastbert.errors import BackendError as BackendError
    from fastbert.errors import CheckpointError as CheckpointError
    from fastbert.errors import ConfigError as ConfigError
    from fastbert.errors import InputError as InputError
    from fastbert.master_weights import MasterWeights as MasterWeights
    from fastbert.models.auto import AutoConfig as AutoConfig
    from fastbert.models.auto import AutoModel as AutoModel
    from fastbert.models.auto import AutoModelForMaskedLM as AutoModelForMaskedLM
    from fastbert.models.auto import AutoModelForMultipleChoice as AutoModelForMultipleChoice
    from fastbert.models.auto import AutoModelForNextSentencePrediction as AutoModelForNextSentencePrediction
    from fastbert.models.auto import AutoModelForPreTraining as AutoModelForPreTraining
    from fastbert.models.auto import AutoModelForQuestionAnswering as AutoModelForQuestionAnswering
    from fastbert.models.auto import AutoModelForSequenceClassification as AutoModelForSequenceClassification
    from fastbert.models.auto import AutoModelForTokenClassification as AutoModelForTokenClassification
    from fastbert.models.baby import baby_config as baby_config
    from fastbert.models.classes import *  # noqa: F403
    from fastbert.models.joint_electra import ElectraForJointPreTraining as ElectraForJointPreTraining
    from fastbert.packed_inputs import PackedInputs as PackedInputs
    from fastbert.packed_inputs import pack_inputs as pack_inputs
    from fastbert.packed_weights import repack as repack
    from fastbert.packing import PackedBatch as PackedBatch
    from fastbert.packing import check_inputs as check_inputs
    from fastbert.quantization import quantization_error as quantization_error
    from fastbert.quantization import quantize as quantize
    from fastbert.sentences.classifier import TextClassifier as TextClassifier
    from fastbert.sentences.encoder import SentenceEncoder as SentenceEncoder
    from fastbert.sentences.multi_vector.encoder import MultiVectorEncoder as MultiVectorEncoder
    from fastbert.sentences.multi_vector.vectors import TokenVectors as TokenVectors
    from fastbert.sentences.multi_vector.vectors import colbert_kd_scores as colbert_kd_scores
    from fastbert.sentences.multi_vector.vectors import colbert_scores as colbert_scores
    from fastbert.sentences.multi_vector.vectors import colbert_scores_pairwise as colbert_scores_pairwise
    from fastbert.sentences.reranker import Reranker as Reranker
    from fastbert.sentences.spans.question_answerer import QuestionAnswerer as QuestionAnswerer
    from fastbert.sentences.spans.token_classifier import TokenClassifier as TokenClassifier
    from fastbert.sentences.sparse_encoder import SparseEncoder as SparseEncoder

_MODULES: dict[str, tuple[str, ...]] = {
    "fastbert.models.auto": (
        "AutoConfig",
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
    "fastbert.acceleration.flattening": ("SentencePackingCollator",),
    "fastbert.acceleration.status": ("status",),
    "fastbert.bulk.ray_engine": ("ray_encode",),
    "fastbert.backend": ("Backend", "use_backend"),
    "fastbert.config": ("EncoderConfig",),
    "fastbert.data.collator": ("PackingCollator",),
    "fastbert.data.chunks": ("Windows",),
    "fastbert.errors": ("BackendError", "CheckpointError", "ConfigError", "InputError"),
    "fastbert.master_weights": ("MasterWeights",),
    "fastbert.backend_report": ("backends",),
    "fastbert.packed_inputs": ("PackedInputs", "pack_inputs"),
    "fastbert.packed_weights": ("repack",),
    "fastbert.packing": ("PackedBatch", "check_inputs"),
    "fastbert.quantization": ("quantization_error", "quantize"),
    "fastbert.sentences.classifier": ("TextClassifier",),
    "fastbert.sentences.encoder": ("SentenceEncoder",),
    "fastbert.sentences.multi_vector.encoder": ("MultiVectorEncoder",),
    "fastbert.sentences.reranker": ("Reranker",),
    "fastbert.sentences.spans.question_answerer": ("QuestionAnswerer",),
    "fastbert.sentences.spans.token_classifier": ("TokenClassifier",),
    "fastbert.sentences.sparse_encoder": ("SparseEncoder",),
    "fastbert.sentences.multi_vector.vectors": (
        "TokenVectors",
        "colbert_kd_scores",
        "colbert_scores",
        "colbert_scores_pairwise",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def from_pretrained(name_or_path: str, **options: Any) -> Any:
    """Load an encoder from a folder, a hub id or a packaged model, as `AutoModel.from_pretrained` does."""
    return _imported("fastbert.models.auto").AutoModel.from_pretrained(name_or_path, **options)


def _imported(module: str) -> Any:
    from importlib import import_module

    from fastbert.importing import without_collector

    with without_collector():
        return import_module(module)


def _public_names() -> list[str]:
    """All of them; the model classes are those that the families' data ask for (families/)."""
    from fastbert.families import FAMILIES

    classes = [
        f"{family.classes}{end}"
        for family in FAMILIES.values()
        for end in ("Model", *(f"For{head}" for head in family.heads))
    ]
    return ["__version__", "from_pretrained", *_HOME, *classes]


if not TYPE_CHECKING:  # or any name would do for a type checker

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return _public_names()
        if name in _HOME:
            home = _imported(_HOME[name])
            globals().update({sibling: getattr(home, sibling) for sibling in _MODULES[_HOME[name]]})
            return globals()[name]
        if not name.startswith("_") and name in _public_names():
            classes = _imported("fastbert.models.classes")
            globals().update({each: getattr(classes, each) for each in classes.__all__})
            return globals()[name]
        raise AttributeError(f"module 'fastbert' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_public_names())
