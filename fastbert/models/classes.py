"""The model classes of every family, made from the families' data (families/): BertModel, BertForMaskedLM, ...

A type checker and an IDE read classes.pyi, which `python -m fastbert.models.generated` writes.
"""

from __future__ import annotations

from fastbert.families import FAMILIES
from fastbert.families.schema import ClassifierHead, Head, MaskedLM, PreTraining, ReplacedTokens, SentencePair
from fastbert.models import classifiers, masked_lm
from fastbert.models.base import EncoderModel, PreTrainedModel
from fastbert.models.heads import HeadModel

_CLASSIFIERS: dict[str, type[HeadModel]] = {
    "SequenceClassification": classifiers.ForSequenceClassification,
    "TokenClassification": classifiers.ForTokenClassification,
    "QuestionAnswering": classifiers.ForQuestionAnswering,
    "MultipleChoice": classifiers.ForMultipleChoice,
}
_HEADS: dict[type[Head], type[HeadModel]] = {
    MaskedLM: masked_lm.ForMaskedLM,
    PreTraining: masked_lm.ForPreTraining,
    SentencePair: masked_lm.ForNextSentencePrediction,
    ReplacedTokens: classifiers.ForReplacedTokens,
}

# By (model_type, what stands behind "For" in the class's name; "Model" for the base model).
CLASSES: dict[tuple[str, str], type[PreTrainedModel]] = {}


def head_class(name: str, head: Head) -> type[HeadModel]:
    """The class that runs a head of the family's data, whatever the family."""
    return _CLASSIFIERS[name] if isinstance(head, ClassifierHead) else _HEADS[type(head)]


def _add(name: str, key: tuple[str, str], base: type[PreTrainedModel], **attributes) -> type[PreTrainedModel]:
    attributes |= {"__module__": __name__, "__doc__": base.__doc__}
    CLASSES[key] = globals()[name] = type(name, (base,), attributes)  # the module's own name is what pickle looks for
    return CLASSES[key]


for _family in FAMILIES.values():
    _type, _begin = _family.model_type, _family.classes
    _base = _add(f"{_begin}Model", (_type, "Model"), EncoderModel, family=_family)
    for _name, _head in _family.heads.items():
        _add(f"{_begin}For{_name}", (_type, _name), head_class(_name, _head), base_class=_base, head_spec=_head)

__all__ = [cls.__name__ for cls in CLASSES.values()]
