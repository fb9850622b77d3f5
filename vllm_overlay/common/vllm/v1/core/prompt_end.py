# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which rows of a prompt DeepSeek V4.1's later layers compute on XPU.

Layers behind the last KV source own the keys of their windows alone. A row of one reads
`window` rows of the layer before it, those read `window - 1` more of the layer before
that, and so on. So what follows a prompt depends on the rows of its end, in all later
layers, and on all rows in the layers up to the source.
"""

from dataclasses import dataclass

from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.platforms import current_platform


@dataclass(frozen=True)
class PromptEnd:
    """`window` rows that end a prompt are right in every later layer, if these begin
    `reach` rows before them."""

    window: int
    reach: int

    @property
    def rows(self) -> int:
        """Rows that later layers compute of a prompt."""
        return self.reach + self.window

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> "PromptEnd | None":
        """None where later layers compute all rows."""
        if not current_platform.is_xpu() or vllm_config.model_config is None:
            return None
        config = vllm_config.model_config.hf_text_config
        if (
            config.model_type != "deepseek_v41"
            or not vllm_config.cache_config.swa_bounded_replay
            or vllm_config.aux_output_config.enable_return_routed_experts
        ):
            return None
        layers, source = config.num_hidden_layers, max(config.kv_source_layer_ids)
        stages = vllm_config.parallel_config.pipeline_parallel_size
        # Later layers read the source's entries, so both must be on the last stage; and
        # a stage's first layer has other inputs than those that replay begins with.
        first = get_pp_indices(layers, stages - 1, stages)[0]
        if stages > 1 and first >= source:
            return None
        window, depth = config.sliding_window, layers - 1 - source
        engram = getattr(config, "engram_layer_ids", None) or ()
        if depth < 1 or any(layer >= source for layer in engram):
            return None
        # The first later layer reads rows of the source, which has all of them. A draft
        # reads a window of what the last one gives.
        drafts = vllm_config.speculative_config is not None
        return cls(window, (depth - 1 + drafts) * (window - 1))
