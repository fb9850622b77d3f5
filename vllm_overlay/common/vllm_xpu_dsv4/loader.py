# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""vLLM's loader of checkpoints, which compares what it reads with what XPU can hold."""

from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm_xpu_dsv4.checkpoint_faults import Following
from vllm_xpu_dsv4.checkpoint_parts import PartsCheck
from vllm_xpu_dsv4.checkpoint_shards import cut_shard
from vllm_xpu_dsv4.checkpoint_tensors import check_tensors
from vllm_xpu_dsv4.load_formats import CHECKED, FORMATS


class CheckedLoader(DefaultModelLoader):
    """Loads a model of DeepSeek-V4's family, or its draft.

    Each tensor is compared with what DeepSeek publishes before the model takes it, what
    is lacking is named after that, and an error names the tensor or the file.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        plain = load_config.load_format.removesuffix(CHECKED)
        super().__init__(replace(load_config, load_format=plain))
        self._files: list[str] = []
        self._following, self._parts = Following(), PartsCheck(None)

    def _prepare_weights(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._prepare_weights(*args, **kwargs)
        self._files += found[1]
        return found

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """The tensors of the checkpoint, as parameters hold them."""
        yield from self._checked(
            model_config, model, super().get_all_weights(model_config, model)
        )

    def _checked(
        self,
        model_config: ModelConfig,
        model: nn.Module,
        weights: Iterable[tuple[str, torch.Tensor]],
    ) -> Iterable[tuple[str, torch.Tensor]]:
        self._parts = PartsCheck(self.local_expert_ids)
        followed = self._following.followed(self._parts.noted(weights))
        config = getattr(model, "config", model_config.hf_config)
        return check_tensors(config, followed, of_draft=_is_draft(model_config))

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load a checkpoint, and look for what it lacks.

        Raises:
            ValueError: a tensor does not fit, or is lacking.
            SafetensorError: a file cannot be opened. The message names it.

        """
        listening = _Listening(model)
        try:
            super().load_weights(listening, model_config)
        except SafetensorError as error:
            raise SafetensorError(cut_shard(self._files, error)) from error
        except Exception as error:
            self._following.blame(error)
            raise
        if not _has_tower_alone(model_config):
            draft = _is_draft(model_config)
            self._parts.check(model, listening.loaded, draft=draft)


class _Listening:
    """A model, and what it says that it loaded."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.loaded: set[str] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        self.loaded = self._model.load_weights(weights)
        return self.loaded


def _is_draft(model_config: ModelConfig) -> bool:
    return model_config.runner_type == "draft"


def _has_tower_alone(model_config: ModelConfig) -> bool:
    """Whether shards are read that have a part of the text model."""
    return getattr(model_config.multimodal_config, "mm_encoder_only", False)


for load_format in FORMATS:
    register_model_loader(load_format + CHECKED)(CheckedLoader)
