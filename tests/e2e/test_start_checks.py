# SPDX-License-Identifier: Apache-2.0
"""Options that XPU cannot serve end the engine's start, each with its reason."""

import json
from pathlib import Path

import pytest
from test_engine import MIXED

from e2e.checks import check_same_tokens
from e2e.commands import ends
from e2e.endings import ended
from e2e.serving import Engines, EngineStopped, Job
from e2e.twin import Twin

pytestmark = pytest.mark.newest

WAVES = (MIXED.waves[0][1:2],)
REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "float16": ({"dtype": "float16"}, "dtype float16 is not supported"),
    "bfloat16 keys": (
        {"kv_cache_dtype": "bfloat16"},
        "--kv-cache-dtype bfloat16 is not supported",
    ),
    "blocks of 16": ({"block_size": 16}, "--block-size 16 is not supported"),
    "blocks of 64": ({"block_size": 64}, "--block-size 64 is not supported"),
    "ranks": (
        {"tensor_parallel_size": 8},
        "--tensor-parallel-size 8 does not divide the model's 2 output groups",
    ),
    "keys over ranks": (
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        "--decode-context-parallel-size 2 is not supported",
    ),
    "prompts over ranks": (
        {"prefill_context_parallel_size": 2},
        "--prefill-context-parallel-size 2 is not supported",
    ),
    "two batches": ({"enable_dbo": True}, "--enable-dbo is not supported"),
    "a draft without stages": (
        {"speculative_config": {"method": "dspark", "num_speculative_tokens": 3}},
        "method dspark is not supported with this checkpoint",
    ),
    "embeddings": (
        {"enable_prompt_embeds": True},
        "--enable-prompt-embeds is not supported",
    ),
    "adapters": ({"enable_lora": True}, "LoRA (--enable-lora) is not supported"),
}
UNNAMED = Job("keys of any type", WAVES, (("kv_cache_dtype", "auto"),))


def job(name: str) -> Job:
    return Job(f"refused {name}", WAVES, tuple(REFUSED[name][0].items()))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.serves(job(name))) for name in REFUSED],
)
def test_the_start_names_the_option(engines: Engines, release: str, name: str) -> None:
    with pytest.raises(EngineStopped) as stopped:
        engines.serve(release, job(name))
    found = ended(str(stopped.value))
    print(f"{release} {name}: {found.kind}: {found.why}")
    assert found.kind == "refuses", found.why
    assert f"DeepSeek V4 on XPU: {REFUSED[name][1]}" in found.why


@pytest.mark.serves(MIXED, UNNAMED)
def test_keys_whose_type_is_left_open(engines: Engines, release: str) -> None:
    check_same_tokens(engines.serve(release, UNNAMED), engines.serve(release, MIXED))


def test_a_checkpoint_that_transformers_saved(
    engines: Engines, release: str, twin: Twin, tmp_path: Path
) -> None:
    """By its own names, and "in the original format", which is not DeepSeek's."""
    described = json.loads((engines.published / "config.json").read_text())
    commands = {"DeepSeek's": [str(engines.published)]}
    for original in (True, False):
        folder = tmp_path / f"original {original}"
        twin.model.save_pretrained(folder, save_original_format=original)
        config = json.loads((folder / "config.json").read_text())
        config["dtype"] = "bfloat16"
        config["quantization_config"] = described["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
        commands[folder.name] = [str(folder)]
    found = ends(engines, release, tmp_path, commands)
    assert found.pop("DeepSeek's") == ""
    for end in found.values():
        assert "a checkpoint that Transformers saved is not supported" in end
