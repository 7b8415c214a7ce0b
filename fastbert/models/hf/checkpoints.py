"""from_pretrained, save_pretrained and push_to_hub of every model class, with the arguments of transformers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from fastbert.checkpoint.arguments import (
    check_format,
    check_saving,
    chosen_device,
    chosen_dtype,
    given_config,
    left_over,
)
from fastbert.checkpoint.dtypes import default_dtype, main_dtype
from fastbert.checkpoint.layouts import to_file, to_tree
from fastbert.checkpoint.pretrained import (
    _same,
    check_layers,
    load_weights,
    read_checkpoint,
    without_pooler,
)
from fastbert.checkpoint.publishing import model_card, push
from fastbert.checkpoint.saving import save
from fastbert.checkpoint.tokenizer_files import copy_tokenizer
from fastbert.checkpoint.unfilled import unfilled_models
from fastbert.checkpoint.weight_files import some
from fastbert.config import EncoderConfig
from fastbert.errors import ConfigError
from fastbert.hub import HubOptions, resolve
from fastbert.models.hf.bases import gets_base

Model = TypeVar("Model", bound="CheckpointMixin")

# What save_pretrained takes for push_to_hub.
_PUSHED = ("repo_id", "commit_message", "commit_description", "private", "revision", "create_pr", "tags")


def _is_users(cls: type) -> bool:
    """Whether a class is a subclass that a user wrote: its constructor may make tensors in dtypes of its own."""
    return cls.__module__ != "fastbert.models.classes"


def _untied(state: dict[str, torch.Tensor], tied: dict[str, str]) -> list[str]:
    """Those second names of shared tensors that have tensors of their own by now, because a leaf was replaced."""

    def is_shared(a: torch.Tensor, b: torch.Tensor) -> bool:
        return (a.data_ptr() == b.data_ptr() and a.shape == b.shape) or _same(a, b)

    pairs = [(copy, original) for copy, original in tied.items() if copy in state]
    return [copy for copy, original in pairs if original not in state or not is_shared(state[copy], state[original])]


class CheckpointMixin(nn.Module):
    """from_pretrained, save_pretrained, push_to_hub and from_config for every model class."""

    config: EncoderConfig
    missing_keys: list[str]
    unexpected_keys: list[str]
    mismatched_keys: list[tuple[str, torch.Size, torch.Size]]
    name_or_path: str = ""  # what it was loaded from, as the caller wrote it
    hf_device_map: dict[str, Any]  # transformers' name for where it is, if the caller gave device_map
    tokenizer_folder: Path | None = None  # where the files of its tokenizer are, if it was loaded from a folder

    def tied_keys(self) -> dict[str, str]:
        """Second names of shared tensors -> the name that a file holds; empty where nothing is tied."""
        return {}

    @property
    def live_config(self) -> EncoderConfig:
        """`config`, as it would describe the weights that are there now."""
        return self.config

    def table_shapes(self, config: EncoderConfig) -> dict[str, tuple[int, ...]]:
        """The shapes of what `config` gives rows by the word, the position or the token type, by their keys."""
        return {}

    def frequency_keys(self) -> list[str]:
        """The keys of the inverse frequencies that the family saves: they stay in float32."""
        return []

    def quantization_entry(self) -> dict[str, Any] | None:
        """What config.json says of int8 layers, under quantization_config; None where there are none."""
        return None

    @classmethod
    def from_pretrained(
        cls: type[Model],
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *,
        config: Any = None,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        dtype: torch.dtype | str | None = "auto",
        torch_dtype: torch.dtype | str | None = None,
        device: torch.device | str | int | None = None,
        device_map: Any = None,
        add_pooling_layer: bool | None = None,
        ignore_mismatched_sizes: bool = False,
        output_loading_info: bool = False,
        use_safetensors: bool | None = None,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        subfolder: str = "",
        **config_changes: Any,
    ) -> Model:
        """Load the model of a folder or hub id, in eval mode. The arguments mean what they mean in transformers.

        Args:
            pretrained_model_name_or_path: a folder with config.json and weights, a hub id, or one of PACKAGED_MODELS.
            config: replaces the folder's config.json: an EncoderConfig, transformers' config, or the path of one. The
                weights are then compared with no other config.
            state_dict: the weights, which are copied, where there is no folder (None); it needs a `config`.
            dtype: a torch dtype or its name; "auto" keeps the checkpoint's own. `torch_dtype` is its old name.
            device, device_map: where to put the model, which stands on one device; the default is the CPU. "auto" is
                the accelerator, if there is one.
            add_pooling_layer: whether a base model has a pooler; None is as in transformers.
            ignore_mismatched_sizes: initialise tensors whose shape in the file is not the config's, with a warning.
            output_loading_info: return (model, what was missing, unexpected and mismatched).
            use_safetensors: raise unless the folder has (True), or has not (False), weights in that format.
            revision, cache_dir, token, local_files_only, force_download, subfolder: for what is on the hub.
            config_changes: entries of the config to change (`num_labels=3`, `id2label={0: "no", 1: "yes"}`), after the
                folder's own config was compared with its weights. `num_hidden_layers` takes fewer layers, or adds new,
                random ones. `attn_implementation` may name any exact attention: fastbert runs its own.

        Raises:
            CheckpointError: there is no checkpoint, a file is damaged, or the weights contradict the config: in their
            shapes, in the number of layers, or because they were saved with a config.json of other shapes.
            ConfigError: the config.json cannot be run, or an argument is not known or not supported (as
            trust_remote_code=True is not: no code from a checkpoint ever runs).
        """
        if (pretrained_model_name_or_path is None) != (state_dict is not None) or (state_dict and config is None):
            raise ConfigError(
                "a state_dict stands for a folder: give pretrained_model_name_or_path=None, state_dict and config"
            )
        name = str(pretrained_model_name_or_path or "")
        changes = left_over(config_changes)
        chosen, target_device = chosen_dtype(dtype, torch_dtype), chosen_device(device, device_map)
        hub = HubOptions(revision, cache_dir, token, local_files_only, force_download, subfolder)
        # Also where the caller is in inference mode: tensors made there keep no version of what is written to them.
        with torch.inference_mode(False):
            folder, replacing = None, given_config(config)
            if pretrained_model_name_or_path is not None:
                folder = resolve(pretrained_model_name_or_path, options=hub)
                check_format(folder, use_safetensors)
                own, weights = read_checkpoint(folder, replacing)
            else:
                assert replacing is not None and state_dict is not None
                own = replacing
                weights = to_tree({key: t.detach().clone() for key, t in state_dict.items()}, own)
            if changes:
                own = own.replace(**changes)
            if replacing is None and not {"num_hidden_layers", "num_hidden_groups", "inner_group_num"} & set(changes):
                check_layers(own, weights, name)
            options = {} if add_pooling_layer is None else {"add_pooling_layer": add_pooling_layer}
            init_dtype = (chosen or main_dtype(weights.values())) if _is_users(cls) else None
            with unfilled_models(), default_dtype(init_dtype):
                model = cls(own, **options)
            if add_pooling_layer is False:
                weights = without_pooler(model, weights)  # type: ignore[arg-type]
            load_weights(model, weights, name, chosen, ignore_mismatched_sizes)  # type: ignore[arg-type]
            model.name_or_path = model.config.name_or_path = name
            model.config._attn_implementation = config_changes.get("attn_implementation")
            model.tokenizer_folder = folder
            model = model.eval() if target_device is None else model.to(target_device).eval()
        if device_map is not None:
            model.hf_device_map = {"": torch.device("cpu") if target_device is None else target_device}
        if not output_loading_info:
            return model
        info: dict[str, Any] = {"missing_keys": set(model.missing_keys), "unexpected_keys": set(model.unexpected_keys)}
        info |= {"mismatched_keys": set(model.mismatched_keys), "error_msgs": []}
        return model, info  # type: ignore[return-value]

    @classmethod
    def from_config(cls: type[Model], config: Any, **options: Any) -> Model:
        """A model with new, random weights, of a config of ours or of transformers; `dtype`, and entries to change."""
        changes = left_over(options)
        dtype = chosen_dtype(changes.pop("dtype", None), changes.pop("torch_dtype", None))
        described = given_config(config)
        with default_dtype(dtype if _is_users(cls) else None):
            model = cls(described.replace(**changes) if changes and described is not None else described)
        return model if dtype is None or _is_users(cls) else model.to(dtype)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str | None = None,
        safe_serialization: bool = True,
        variant: str | None = None,
        token: str | bool | None = None,
        **others: Any,
    ) -> None:
        """Write config.json and model.safetensors with Hugging Face's names. Replaces old files whole or not at all.

        The files of the tokenizer are copied, too, if the model was loaded from a folder that has them and the new
        folder has none. `state_dict` is saved in the place of the model's own tensors (the Trainer gathers them so);
        where `is_main_process` is false, nothing is done. `push_to_hub` and what it takes: see `push_to_hub`.

        The metadata of the weights hold a checksum of each tensor and a hash of config.json, which loading verifies.
        After a kill, a full disk or a power failure at any point, fastbert loads the folder as one save, the old or the
        new. Other programs do not know the hash: if the kill comes in the few milliseconds between the two renames at
        the end, they find the new weights beside the old config.json. Two processes that save into one folder wait for
        each other. Files that a killed process has left are removed.

        The files of a quantised model (fastbert.quantize) hold integers and their scales. from_pretrained reads them;
        transformers raises ValueError. Layers and tables that were replaced are saved as they are.

        Raises:
            OSError: the folder cannot be written.
            ConfigError: no config describes the model, for example a decoder of other words than the word table has; or
            an argument asks for what is not written (shards, pickles).
            CheckpointError: it lacks a part of what is one tensor in its family's files. Nothing is written then.
        """
        if not is_main_process:
            return
        if getattr(self, "_hf_peft_config_loaded", False):  # by transformers' add_adapter: it saves the adapter alone
            super().save_pretrained(  # type: ignore[misc]
                save_directory, state_dict=state_dict, push_to_hub=push_to_hub, variant=variant, token=token, **others
            )
            return
        folder = Path(save_directory)
        push_options = {name: others.pop(name) for name in _PUSHED if name in others}
        if push_options and not push_to_hub:
            raise ConfigError(f"{next(iter(push_options))} goes with push_to_hub=True")
        weights, entries = self._to_save(self.state_dict() if state_dict is None else state_dict)
        size = sum(t.nbytes for t in weights.values())
        check_saving(safe_serialization, variant, max_shard_size, size, others)
        save(folder, weights, entries)
        copy_tokenizer(self.tokenizer_folder, folder)
        if push_to_hub:
            push(folder, push_options.pop("repo_id", folder.name), self.model_card, token=token, **push_options)

    def _to_save(self, state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What model.safetensors and config.json hold."""
        config, tied = self.live_config, self.tied_keys()
        if _untied(state, tied):  # then all of them are saved, each with memory of its own, as safetensors wants it
            config, state, tied = (
                config.replace(tie_word_embeddings=False),
                {**state, **{k: state[k].clone() for k in tied if k in state}},
                {},
            )
        weights = {k: t.detach().cpu().contiguous() for k, t in state.items() if k not in tied}
        wrong = [
            f"{key} is {tuple(weights[key].shape)}, not {shape}"
            for key, shape in self.table_shapes(config).items()
            if key in weights and weights[key].shape != shape
        ]
        if wrong:
            raise ConfigError(f"nothing was saved: tables have other shapes than the config says: {some(wrong)}")
        entries = {**config.to_dict(), "architectures": [type(self).__name__]}
        entries.pop("torch_dtype", None)  # today's name is dtype
        entries["dtype"] = str(self.dtype).removeprefix("torch.")
        if entries.get("gradient_checkpointing"):  # as in transformers: it is the training's, not the model's
            del entries["gradient_checkpointing"]
        entries.pop("quantization_config", None)  # what a config says and what the model is may differ by now
        if (quantization := self.quantization_entry()) is not None:
            entries["quantization_config"] = quantization
        else:  # integers are for us alone, under the names of the tree
            weights = to_file(weights, config)
        return weights, entries

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str | None = None,
        tags: list[str] | str | None = None,
    ) -> str:
        """Upload what save_pretrained writes, with a model card unless the repository has one; the commit's address.

        The repository is made if it is not there. `tags` go into the card.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            return push(
                *(Path(folder), repo_id, self.model_card),
                commit_message=commit_message,
                commit_description=commit_description,
                private=private,
                token=token,
                revision=revision,
                create_pr=create_pr,
                tags=tags,
            )

    def model_card(self, repo_id: str, tags: list[str] | str | None = None) -> str:
        """The README.md of a repository that holds this model, for you to complete."""
        added = getattr(self, "model_tags", None) or []  # by transformers' add_model_tags
        tags = [*added, *([tags] if isinstance(tags, str) else tags or [])]
        return model_card(type(self).__name__, self.live_config, repo_id, self.name_or_path, tags)


gets_base(CheckpointMixin, "transformers.modeling_utils", "PreTrainedModel")
