# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of 0.1.10 and later: not on DeepSeek-V4's path."""

from typing import Any, NoReturn


def apply_rotary_emb(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError("apply_rotary_emb on the emulated XPU")
