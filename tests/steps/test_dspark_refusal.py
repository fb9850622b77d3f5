# SPDX-License-Identifier: Apache-2.0
"""DSpark, which has no draft model on XPU, is refused with what to use instead."""

from pathlib import Path
from typing import Any

import pytest
from helpers import layout, model_configs


@pytest.fixture(autouse=True)
def looks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at a model's class in this process, not in one that imports vLLM anew."""
    registry = layout.module("vllm.model_executor.models.registry")
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())


def end_of_configuration(method: str, folder: Path) -> str:
    """What a configuration that speculates by `method` ends with."""
    config = layout.module("vllm.config")
    model_configs.write_config(folder)
    target = config.ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16"
    )
    try:
        config.SpeculativeConfig(
            method=method,
            num_speculative_tokens=1,
            target_model_config=target,
            target_parallel_config=config.ParallelConfig(),
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "a configuration"


def test_it_names_what_to_use_instead(tmp_path: Path) -> None:
    end = end_of_configuration("dspark", tmp_path)
    wanted = "NotImplementedError: DSpark of DeepSeek-V4 has no draft model on"
    assert end.startswith(wanted), f"the configuration ends with {end}"
    assert '"method": "mtp"' in end


@pytest.mark.unchanged
def test_other_platforms_look_for_the_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = type(layout.module("vllm.platforms").current_platform)
    speculation: Any = layout.module("vllm.config").SpeculativeConfig
    monkeypatch.setattr(platform, "is_xpu", lambda self: False)
    monkeypatch.setattr(speculation, "update_arch_", lambda self: None)
    assert end_of_configuration("dspark", tmp_path) == "a configuration"
