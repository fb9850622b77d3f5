# SPDX-License-Identifier: Apache-2.0
"""FlashAttention: vLLM imports it, and DeepSeek-V4 never calls it."""

from typing import Any, NoReturn


def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("flash_attn_varlen_func on the emulated XPU")
