# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""DeepSeek-V4 Vision on XPU."""

from collections.abc import Iterable

import torch

from vllm.model_executor.model_loader.deepseek_v4_checkpoint import check_tensors

from ..common import vl_model


class DeepseekV4ForConditionalGeneration(vl_model.DeepseekV4ForConditionalGeneration):
    """The multimodal model of all platforms, whose tensors are compared with what
    DeepSeek publishes, as those of XPU's text model are."""

    requires_scales = True

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        # The text model would compare them under names that they do not have in the
        # checkpoint.
        self.language_model.checks_tensors = False
        # A server of the tower alone reads shards that have a part of the text model.
        self.requires_scales = not self.multimodal_config.mm_encoder_only
        return super().load_weights(check_tensors(self.config, weights))
