# SPDX-License-Identifier: Apache-2.0
"""Starts of a server on XPU, up to its configuration."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import layout, model_configs

SERVED = {"dtype": "bfloat16", "block_size": 256, "kv_cache_dtype": "fp8"}


@pytest.fixture(autouse=True)
def looks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at a model's class in this process, not in one that imports vLLM anew."""
    registry = layout.module("vllm.model_executor.models.registry")
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())


def configured(folder: Path, fields: dict[str, Any], **options: Any) -> Any:
    """The configuration of a server of a small V4 with these `fields`."""
    return model_configs.engine_config(folder, fields, **SERVED | options)


def end(start: Callable[[], Any]) -> str:
    """How a start ends, or that it goes on."""
    try:
        start()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "a configuration"


def check_again(config: Any) -> None:
    """Let the platform look at a configuration that was changed since."""
    config.additional_config = {}
    layout.module("vllm.platforms").current_platform.check_and_update_config(config)
