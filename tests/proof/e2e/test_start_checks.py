# SPDX-License-Identifier: Apache-2.0
"""Options that XPU cannot serve end the engine's start, each with its reason."""

import json
from pathlib import Path

import pytest
from test_engine import MIXED

from proof.e2e.judging.checks import check_same_tokens
from proof.e2e.running.commands import ends
from proof.e2e.running.serving import Engines, Job
from proof.e2e.twins.twin import Twin

pytestmark = pytest.mark.newest

DRAFTS = "--speculative-config"
REFUSED = {
    "--dtype float16": "dtype float16 is",
    "--kv-cache-dtype bfloat16": "--kv-cache-dtype bfloat16 is",
    "--block-size 16": "--block-size 16 is",
    "--block-size 64": "--block-size 64 is",
    "-tp 8": "--tensor-parallel-size 8 does",
    "-tp 2 -dcp 2": "--decode-context-parallel-size 2 is",
    "-pcp 2": "--prefill-context-parallel-size 2 is",
    "--enable-dbo": "--enable-dbo is",
    f"{DRAFTS}.method dspark {DRAFTS}.num_speculative_tokens 3": "method dspark is",
    "--enable-prompt-embeds": "--enable-prompt-embeds is",
    "--enable-lora": "LoRA (--enable-lora) is",
}
"""How the error begins, by the options; it goes on with "not"."""
UNNAMED = Job("keys of any type", (MIXED.waves[0][1:2],), (("kv_cache_dtype", "auto"),))


@pytest.fixture(scope="module")
def found(
    engines: Engines, release: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """How each start ends."""
    folder = str(engines.published)
    commands = {options: [folder, *options.split()] for options in REFUSED}
    return ends(engines, release, tmp_path_factory.mktemp("refused"), commands)


@pytest.mark.parametrize("options", REFUSED)
def test_the_start_names_the_option(found: dict[str, str], options: str) -> None:
    assert f"DeepSeek V4 on XPU: {REFUSED[options]} not " in found[options]


def test_the_switch_leaves_the_options_to_vllm(
    engines: Engines, release: str, tmp_path: Path
) -> None:
    commands = {"float16": [str(engines.published), "--dtype", "float16"]}
    found = ends(engines, release, tmp_path, commands, XPU_DSV4_POLICY="0")
    assert found == {"float16": ""}


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
