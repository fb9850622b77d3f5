# SPDX-License-Identifier: Apache-2.0
"""What is refused of DeepSeek V4.1."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import layout, v41
from helpers.v41_drafts import DRAFT, METHOD

from . import starts


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"block_size": 256}, "Use --block-size 128"),
        ({"dtype": "float16"}, "Use --dtype bfloat16"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "Use --kv-cache-dtype fp8"),
        ({"enable_prompt_embeds": True}, "send text or token ids"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "keys of the sliding window",
        ),
        ({"prefill_context_parallel_size": 2}, "use more ranks by"),
    ],
    ids=["block-size", "dtype", "nvfp4-cache", "embeds", "keys", "prompts"],
)
def test_what_v41_does_not_serve(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    end = starts.end(lambda: v41.configured(tmp_path, **options))
    assert "DeepSeek V4.1 on XPU: " in end, f"the start ends with {end}"
    assert reason in end


@pytest.mark.unchanged
@pytest.mark.parametrize("images", [0, 1])
def test_v41_is_served_with_images_and_without(images: int, tmp_path: Path) -> None:
    options = {"limit_mm_per_prompt": {"image": images}}
    end = starts.end(lambda: v41.configured(tmp_path, **options))
    assert end == "a configuration"


SOURCES = {"kv_source_layer_ids": [1, 2, 3]}
WINDOWS = {"compress_ratios": [0, 2, 1, 0], "index_source_layer_ids": [1, 2]}
IN_A_GROUP = "begin at one of the layers [1, 2]"


@pytest.mark.parametrize(
    ("partition", "text", "reason"),
    [
        ("3,1", {}, IN_A_GROUP),
        ("2,2", {}, None),
        ("3,1", WINDOWS, None),
        ("3,1", SOURCES, "layer 2 chose in an earlier one"),
        ("3,1", SOURCES | {"index_source_layer_ids": [1, 2]}, None),
        ("3,1", SOURCES | {"candidate_source_layer_id": 3}, None),
        ("2,2", {"candidate_source_layer_id": 0}, "layer 0 chose in an earlier one"),
        ("3,1", SOURCES | {"candidate_source_layer_id": -1}, None),
    ],
    ids=[
        *("group", "source", "windows", "blocks", "no-choice", "own-blocks"),
        *("first", "no-blocks"),
    ],
)
def test_stages_of_v41(
    partition: str,
    text: dict[str, Any],
    reason: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checks = layout.module("vllm_xpu_dsv4.v41")
    config = v41.configured(tmp_path)
    config.model_config.hf_text_config.update(text)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    config.parallel_config.pipeline_parallel_size = 2
    found = checks.pipeline_stages(config)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("connector", "not tested with V4.1"),
        ("replicas", "not tested with V4.1"),
        ("length", "--max-model-len must be "),
        ("runner", "Use VLLM_USE_V2_MODEL_RUNNER=1"),
        ("nvfp4", "experts in NVFP4"),
        ("fp8", "experts in FP8"),
    ],
)
def test_what_nobody_ran_with_v41(
    option: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = v41.configured(tmp_path)
    if option == "connector":
        config.kv_transfer_config = SimpleNamespace(kv_connector="ExampleConnector")
    elif option == "replicas":
        config.parallel_config.data_parallel_size = 2
    elif option == "runner":
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    elif option == "nvfp4":
        config.model_config.hf_config.quantization_config["moe_quant_algo"] = "nvfp4"
    elif option == "fp8":
        config.model_config.hf_config.quantization_config["expert_dtype"] = "fp8"
    else:
        config.model_config.max_model_len = 1 << 22
        config.scheduler_config.max_num_batched_tokens = 8192
    end = starts.end(lambda: starts.check_again(config))
    assert reason in end, f"the start ends with {end}"


def test_the_longest_context_of_v41(tmp_path: Path) -> None:
    """A buffer of prefill has at most 2**31 elements."""
    checks = layout.module("vllm_xpu_dsv4.v41")
    config = v41.configured(tmp_path)
    text, model = config.model_config.hf_text_config, config.model_config
    config.scheduler_config.max_num_batched_tokens, chunk = 8192, 8192
    model.max_model_len = 1 << 24
    found = re.search(r"must be at most (\d+),", checks.gathered_rows(config))
    assert found is not None
    model.max_model_len = int(found[1])
    assert checks.gathered_rows(config) is None
    rows = model.max_model_len + text.sliding_window + chunk
    assert rows * text.head_dim == 2**31


def test_a_request_of_v41_that_does_not_fit(tmp_path: Path) -> None:
    batched = 2048
    most = 2**31 // 512 - 128 - batched
    for length in (most, most + 1):
        text = {"max_position_embeddings": length}
        options = {"max_model_len": length, "max_num_batched_tokens": batched}
        end = starts.end(lambda: v41.configured(tmp_path, text, **options))  # noqa: B023
        wanted = "a configuration" if length == most else f"must be at most {most}, "
        assert wanted in end, f"{length} tokens: the start ends with {end}"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"method": "ngram", "prompt_lookup_max": 2},
            '\'{"method": "dspark", "num_speculative_tokens": 3}\'',
        ),
        ({"enable_adaptive_verification": True}, "enable_adaptive_verification is not"),
    ],
    ids=["ngram", "adaptive"],
)
def test_drafts_that_nobody_ran_with_v41(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    drafts = METHOD | options
    end = starts.end(lambda: v41.configured(tmp_path, DRAFT, speculative_config=drafts))
    assert "DeepSeek V4.1 on XPU: " in end, f"the start ends with {end}"
    assert reason in end


def test_a_checkpoint_of_v41_without_a_draft_names_one_token(tmp_path: Path) -> None:
    ngram = {"method": "ngram", "prompt_lookup_max": 2, "num_speculative_tokens": 3}
    end = starts.end(lambda: v41.configured(tmp_path, speculative_config=ngram))
    assert '"num_speculative_tokens": 1}' in end, f"the start ends with {end}"
