"""The objectives of pre-training as tasks."""

from __future__ import annotations

from fastbert.training.pretraining.distil import Distillation, Student, student_of
from fastbert.training.pretraining.make import make_task
from fastbert.training.pretraining.masked import MaskedLM, PairedLM
from fastbert.training.pretraining.replaced import ReplacedTokens

__all__ = ["Distillation", "MaskedLM", "PairedLM", "ReplacedTokens", "Student", "make_task", "student_of"]
