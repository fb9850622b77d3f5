# SPDX-License-Identifier: Apache-2.0
"""FlashAttention is not on DeepSeek-V4's path: imported by vLLM, never called."""

from typing import Any, NoReturn


def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("flash_attn_varlen_func on the emulated XPU")
