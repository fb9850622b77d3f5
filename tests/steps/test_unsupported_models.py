# SPDX-License-Identifier: Apache-2.0
"""Models that XPU cannot run are refused at the start, with the model to use
instead."""

from typing import Any

import pytest
from helpers import layout, model_configs

REGISTRY = "vllm.model_executor.models.registry"
MODELS = {
    "DeepseekV41ForCausalLM": "DeepSeek-V4.1",
    "DSparkV41DraftModel": "DSpark of DeepSeek-V4.1",
    "DeepseekV4ForConditionalGeneration": "DeepSeek-V4 vision",
}


def registered(architecture: str) -> Any:
    return layout.module(REGISTRY).ModelRegistry.models[architecture].load_model_cls()


def is_served(architecture: str) -> bool:
    """Whether a later step serves it."""
    module = registered(architecture).__module__
    return ".xpu." in module and not module.endswith("vl_stub")


def end_of_start(architecture: str, stages: int = 1) -> str:
    """The error that the start of a server of this architecture ends with, if its
    layers are spread over so many pipeline stages."""
    kind = registered(architecture)
    info = layout.module(REGISTRY)._ModelInfo.from_model_cls(kind)
    if not info.is_text_generation_model:
        return "this model does not support `--runner generate`"
    if stages > 1 and not info.supports_pp:
        return "Pipeline parallelism is not supported for this model"
    config = model_configs.vllm_config(speculative_tokens=1)
    with model_configs.current(config):
        try:
            kind(vllm_config=config)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "a model"


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("architecture", MODELS)
def test_it_says_what_is_supported(architecture: str, stages: int) -> None:
    if is_served(architecture):
        return
    end = end_of_start(architecture, stages)
    wanted = f"NotImplementedError: {MODELS[architecture]} ({architecture})"
    assert end.startswith(wanted), f"the start ends with {end}"
    assert "DeepseekV4ForCausalLM" in end


@pytest.mark.unchanged
@pytest.mark.parametrize("architecture", ["DeepseekV4ForCausalLM", "DSparkDraftModel"])
def test_what_xpu_runs_stays(architecture: str) -> None:
    assert registered(architecture).__module__.startswith("vllm.models.deepseek_v4.xpu")
