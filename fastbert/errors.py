"""The errors that more than one part of fastbert raises. Each message names the value and what is allowed."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration cannot be run. The message names the field, its value and what is allowed."""


class InputError(ValueError):
    """An input is out of bounds. No kernel has seen it; the message names the value and the limit."""


class CheckpointError(ValueError):
    """A checkpoint cannot be found or read, or does not fit the model. The message names the file or the keys."""


class TextFileError(ValueError):
    """A file that cannot be read as it was asked for: the message has the file, the place in it, and what is wrong."""


class BackendError(RuntimeError):
    """A backend that was asked for by name cannot serve the call. The message holds its reason."""


class TrainingError(RuntimeError):
    """A run cannot go on. The message says why, and which checkpoint is the last good one."""
