"""BERT (Devlin et al. 2018): the family that the others are described against."""

from fastbert.families.form import Family, MaskedLM, PreTraining, SentencePair, TheirClass, heads

FAMILY = Family(
    model_type="bert",
    classes="Bert",
    prefix="bert",
    theirs=TheirClass("bert"),
    heads=heads(MaskedLM(), PreTraining=PreTraining(MaskedLM()), NextSentencePrediction=SentencePair()),
)
