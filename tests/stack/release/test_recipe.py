# SPDX-License-Identifier: Apache-2.0
"""deploy/recipe.yaml beside the page's flags for few cards."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from fenced import block

ROOT = Path(__file__).parents[3]
PAGE = "docs/deploying.md"
BASE = (
    *("--kv-cache-dtype=fp8", "--block-size=256"),
    *("--reasoning-parser=deepseek_v4", "--tool-call-parser=deepseek_v4"),
    "--enable-auto-tool-choice",
)
"""What vLLM's own recipe of the model has already."""


@pytest.fixture(scope="module")
def recipe() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "deploy/recipe.yaml").read_text())
    return found


def flags(words: list[str]) -> set[str]:
    return set(re.sub(r" (?!--)", "=", " ".join(words)).split(" "))


def test_its_flags_are_those_of_the_page(recipe: dict[str, Any]):
    variant = recipe["variants"]["host_experts"]
    text = block(PAGE, "few-cards").replace("\\\n", " ")
    _, *given = shlex.split(text.partition("vllm serve ")[2])
    assert flags(variant["extra_args"]) | set(BASE) == flags(given)
    command = re.search(r"vllm-xpu-dsv4:\S+ \S+ (.*?)\n```", recipe["guide"], re.S)
    assert command
    shown = flags(shlex.split(command[1].replace("\\\n", " ")))
    assert shown - flags(given) == {"--tensor-parallel-size=4"}
    assert flags(given) <= shown


def test_its_variables_are_those_of_the_page(recipe: dict[str, Any]):
    given = recipe["variants"]["host_experts"]["extra_env"]
    words = shlex.split(block(PAGE, "thresholds").replace("export ", ""))
    words += ["VLLM_WORKER_MULTIPROC_METHOD=spawn"]
    assert given == dict(word.split("=") for word in words)


def test_its_image_is_the_page_s(recipe: dict[str, Any]):
    variant = recipe["variants"]["host_experts"]
    image = variant["docker_image"]["intel"]
    assert image in block(PAGE, "image") and image in recipe["guide"]
    assert image.endswith(variant["min_vllm_version"])
    assert set(variant["supported_hardware"]) == set(recipe["meta"]["hardware"])
