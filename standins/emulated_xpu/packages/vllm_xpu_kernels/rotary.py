# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of 0.1.10 and later: vLLM imports it, and DeepSeek-V4 never calls
it."""

from typing import Any, NoReturn


def apply_rotary_emb(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("apply_rotary_emb on the emulated XPU")
