# SPDX-License-Identifier: Apache-2.0
"""`--quantization online` alone says what it needs."""

import json
from pathlib import Path

import pytest
from helpers import layout, model_configs


def end_of_configuration(
    folder: Path, quantization: str | None, told: dict[str, str] | None = None
) -> str:
    model_configs.write_config(folder)
    written = folder / "config.json"
    fields = json.loads(written.read_text()) | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": None,
    }
    written.write_text(json.dumps(fields))
    arguments = layout.module("vllm.engine.arg_utils").EngineArgs
    try:
        arguments(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=512,
            quantization=quantization,
            quantization_config=told,
        ).create_engine_config()
    except Exception as error:
        return str(error)
    return "a configuration"


@pytest.fixture(autouse=True)
def looks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at a model's class in this process, not in one that imports vLLM anew."""
    registry = layout.module("vllm.model_executor.models.registry")
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())


def test_it_names_the_option(tmp_path: Path) -> None:
    assert "needs quantization_config" in end_of_configuration(tmp_path, "online")


@pytest.mark.unchanged
@pytest.mark.parametrize("quantization", [None, "fp8_per_tensor", "fp8"])
def test_others_need_none(tmp_path: Path, quantization: str | None) -> None:
    assert end_of_configuration(tmp_path, quantization) == "a configuration"


@pytest.mark.unchanged
def test_what_it_needs_is_taken(tmp_path: Path) -> None:
    end = end_of_configuration(tmp_path, "online", {"linear": "fp8_per_tensor"})
    assert end == "a configuration"
