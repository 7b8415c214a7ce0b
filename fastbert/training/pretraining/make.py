"""From the options of `fastbert pretrain` to its task: text, vocabulary, model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastbert.checkpoint.pretrained import read_config
from fastbert.config import EncoderConfig
from fastbert.data.pretraining.corpus import Corpus, tokenize_corpus
from fastbert.data.sources import Source, delimiter_for
from fastbert.data.vocabulary import Design, Vocabulary, has_vocabulary, read_vocabulary, train_vocabulary
from fastbert.errors import ConfigError
from fastbert.families import FAMILIES
from fastbert.hub import resolve
from fastbert.models.auto import model_class
from fastbert.models.joint_electra import ElectraForJointPreTraining
from fastbert.training.options import DATA, PretrainOptions
from fastbert.training.pretraining.distil import Distillation, Student, student_of
from fastbert.training.pretraining.masked import MaskedLM, PairedLM
from fastbert.training.pretraining.phases import length_schedule, masking_schedule
from fastbert.training.pretraining.presets import check_head, family_of, new_config, preset_of
from fastbert.training.pretraining.replaced import GENERATOR, ReplacedTokens, generator_config
from fastbert.training.task import Phase

_OF_NEW_MODELS = ("preset", "family")
_OF_NEW_VOCABULARIES = ("vocab_size", "vocab_kind", "cased")


def make_task(options: PretrainOptions) -> MaskedLM:
    """The task that the options describe: its data are read, its model is made.

    Raises ConfigError, InputError or CheckpointError: options, data or a checkpoint that do not fit.
    """
    if not options.train:
        raise ConfigError("train is missing: the files of text to learn from")
    masking_schedule(options)
    longest = max(length for _, length in length_schedule(options))
    source = options.teacher if options.objective == "distil" else options.model
    _check_options(options, source)
    train = options.train[0] if len(options.train) == 1 else list(options.train)
    if source:
        folder = resolve(source)
        config = read_config(folder)
        _check_checkpoint(options, source, config)
        vocabulary = _read_vocabulary(options, source, folder, config)
    else:
        preset = preset_of(options)
        family = family_of(preset, options.family, options.objective)
        vocabulary = _new_vocabulary(options, family, train, longest)
        config, folder = new_config(preset, family, vocabulary, longest), None
    model = _make_model(options, config, folder)
    _check_length(model, longest)
    corpus = _corpus(train, vocabulary, options, "train")
    judge = options.eval[0] if len(options.eval) == 1 else list(options.eval)
    held_out = _corpus(judge, vocabulary, options, "eval") if judge else None
    settings: dict[str, Any] = {
        "unit": options.unit,
        "seed": options.seed,
        "vocabulary": vocabulary,
        "held_out": held_out,
    }
    arguments, settings["held_out_length"] = (corpus, vocabulary.tokenizer), length_schedule(options)[-1][1]
    if options.objective == "distil":
        task: MaskedLM = Distillation(Student(student_of(model)), *arguments, teacher=model, **settings)
    elif options.objective == "rtd":
        task = ReplacedTokens(model, *arguments, **settings)
    elif options.objective == "mlm":
        task = MaskedLM(model, *arguments, **settings)
    else:
        task = PairedLM(model, *arguments, pairs=options.objective.removeprefix("mlm+"), **settings)  # type: ignore[arg-type]
    task.collate(Phase(1, 0))  # raises what a tokenizer without a mask token, or without marks of words, makes of it
    task.examples(0, Phase(1, 0, max_length=longest))  # and what chunks and pairs object to
    return task


def _check_options(options: PretrainOptions, source: str) -> None:
    """Options that would be ignored, and those that are missing."""
    if options.objective == "distil" and not options.teacher:
        raise ConfigError("distil needs a teacher: the model that the student learns from")
    if options.teacher and (options.objective != "distil" or options.model):
        raise ConfigError("teacher goes with objective distil, whose student is made of it: leave out model")
    if source and (name := next((name for name in _OF_NEW_MODELS if getattr(options, name)), None)) == "preset":
        raise ConfigError(f"{name} is the shape of a new model, and {source} has one: leave one out")
    if source or options.tokenizer:
        vocab_source = options.tokenizer or source
        if name := next((name for name in _OF_NEW_VOCABULARIES if getattr(options, name)), None):
            raise ConfigError(f"{name} is for a new vocabulary, and that of {vocab_source} is taken: leave one out")


def _check_checkpoint(options: PretrainOptions, source: str, config: EncoderConfig) -> None:
    if options.family and options.family != config.model_type:
        raise ConfigError(f"{source} is of the family {config.model_type}, and family is {options.family}")
    check_head(config.model_type, options.objective)


def _read_vocabulary(options: PretrainOptions, source: str, folder: Path, config: EncoderConfig) -> Vocabulary:
    """That of the checkpoint, or the one that was given, which must be the same. Raises ConfigError."""
    vocabulary = read_vocabulary(resolve(options.tokenizer) if options.tokenizer else folder, config.family.vocabulary)
    if vocabulary.size > config.vocab_size:
        raise ConfigError(
            f"the vocabulary of {options.tokenizer or source} has {vocabulary.size} tokens, and the word table of"
            f" {source} {config.vocab_size} rows: they do not belong together"
        )
    if options.tokenizer and has_vocabulary(folder):
        ours, theirs = read_vocabulary(folder).tokenizer.get_vocab(), vocabulary.tokenizer.get_vocab()
        if other := next((token for token, i in theirs.items() if ours.get(token) != i), None):
            raise ConfigError(
                f"the vocabulary of {options.tokenizer} is not that of {source}: {other!r} has id {theirs[other]} in"
                f" the one, and {ours.get(other, 'none')} in the other"
            )
    return vocabulary


def _new_vocabulary(options: PretrainOptions, model_type: str, train: Source, longest: int) -> Vocabulary:
    """That of a folder, or one that is trained. A run that goes on takes its own."""
    if options.tokenizer:
        return read_vocabulary(resolve(options.tokenizer), FAMILIES[model_type].vocabulary)
    if options.resume and has_vocabulary(Path(options.output)):
        return read_vocabulary(Path(options.output))
    family, size = FAMILIES[model_type], options.vocab_size
    spec, known = family.vocabulary, EncoderConfig.of_family(model_type)
    design = Design(
        kind=options.vocab_kind or spec.kind,
        size=size or preset_of(options).vocab_size or known.vocab_size,
        special=dict(spec.special),
        separators=spec.separators,
        has_types=known.embeddings.token_type is not None,
        cased=options.cased,
        max_length=max(512, longest),
    )
    return train_vocabulary(train, design, column=options.column, delimiter=_delimiter(options, "train"))


def _make_model(options: PretrainOptions, config: EncoderConfig, folder: Path | None) -> Any:
    """A new model, or the one of a folder. Its missing heads are new, and from_pretrained warns of them."""
    head = check_head(config.model_type, options.objective)
    cls = model_class(config.model_type, head)
    if options.objective == "rtd":
        return _make_pair(config, folder, cls)
    model: Any = cls(config) if folder is None else cls.from_pretrained(folder)
    if options.objective == "distil" and model.missing_keys:
        raise ConfigError(
            f"{options.teacher} cannot teach: it has no masked-LM head ({model.missing_keys[0]} is missing, ...);"
            " `fastbert pretrain --model` gives it one"
        )
    return model


def _make_pair(config: EncoderConfig, folder: Path | None, cls: Any) -> ElectraForJointPreTraining:
    maker = model_class(config.model_type, "MaskedLM")
    if folder is None:
        return ElectraForJointPreTraining(maker(generator_config(config)), cls(config))  # type: ignore[arg-type]
    if not (folder / GENERATOR).is_dir():
        raise ConfigError(f"{folder} has no folder {GENERATOR}: rtd goes on with both models, as it has saved them")
    generator: Any = maker.from_pretrained(folder / GENERATOR)
    return ElectraForJointPreTraining(generator, cls.from_pretrained(folder))


def _check_length(model: Any, longest: int) -> None:
    for one in (model.generator, model.discriminator) if isinstance(model, ElectraForJointPreTraining) else (model,):
        limit = one.base_model.table_sizes().longest(one.config)
        if limit is not None and longest > limit:
            raise ConfigError(f"max_length is {longest}, and the model's position table has room for {limit} tokens")


def _corpus(source: Source, vocabulary: Vocabulary, options: PretrainOptions, name: str) -> Corpus:
    return tokenize_corpus(
        source, vocabulary.tokenizer, column=options.column, split=DATA[name], delimiter=_delimiter(options, name)
    )


def _delimiter(options: PretrainOptions, name: str) -> str | None:
    """For the files of --train or --eval."""
    return delimiter_for(vars(options)[name], (*options.train, *options.eval), options.delimiter)
