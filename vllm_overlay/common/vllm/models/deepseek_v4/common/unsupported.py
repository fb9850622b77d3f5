# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Models of the DeepSeek V4 family on platforms that cannot run them."""

from typing import ClassVar, Literal, NoReturn

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.sequence import IntermediateTensors


class UnsupportedModel(nn.Module):
    """A model whose construction says what the platform supports instead.

    It has the methods that the registry asks of a model that generates text, with
    pipeline stages too: else the configuration is refused before that, with a
    misleading reason.
    """

    supports_pp: ClassVar[Literal[True]] = True
    message: str

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        raise NotImplementedError(self.message)

    def embed_input_ids(self, input_ids: torch.Tensor) -> NoReturn:
        raise NotImplementedError(self.message)

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> NoReturn:
        raise NotImplementedError(self.message)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        *,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> NoReturn:
        raise NotImplementedError(self.message)

    def compute_logits(self, hidden_states: torch.Tensor) -> NoReturn:
        raise NotImplementedError(self.message)
