"""BERT (Devlin et al. 2018): the family that the others are described against."""

from fastbert.families.schema import Family, HfClass, MaskedLM, PreTraining, SentencePair, heads

FAMILY = Family(
    model_type="bert",
    classes="Bert",
    prefix="bert",
    hf_class=HfClass("bert"),
    heads=heads(MaskedLM(), PreTraining=PreTraining(MaskedLM()), NextSentencePrediction=SentencePair()),
)
