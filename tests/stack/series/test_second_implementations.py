# SPDX-License-Identifier: Apache-2.0
"""A kernel for which vllm-xpu-kernels has an op comes where the pin lacks it alone; and
what stands twice, because a fix must not need the policy, answers alike."""

import ast
from pathlib import Path

import pytest

from stack.base import releases
from stack.core.project import Project
from stack.series.patch import load_series

PROJECT = Project.find(Path(__file__).parent)
OPS = {
    "compressor": "fused_kv_compress_norm_rope_insert_sparse_attn",
    "indexer_q": "deepseek_fused_indexer_q_rope_fp8",
    "mhc": "mhc_pre",
}
"""The op of vllm-xpu-kernels that does what a kernel of ours does."""


def ops(version: str) -> set[str]:
    """The names of the ops that a version registers."""
    text = (PROJECT.root / f"standins/emulated_xpu/schemas/{version}.txt").read_text()
    return {line.partition("(")[0].rpartition(":")[2] for line in text.splitlines()}


@pytest.mark.parametrize(
    "release", list(releases.load(PROJECT)), ids=lambda release: release.name
)
def test_no_kernel_doubles_an_op_of_the_pin(release: releases.Release) -> None:
    pinned = ops(release.xpu_kernels.version)
    brought = {
        (step.slug, kernel)
        for step in load_series(PROJECT, release.name)
        for kernel in step.trailers.kernels
    }
    doubled = [pair for pair in brought if OPS.get(pair[1]) in pinned]
    assert not doubled, f"{release.name} pins the ops of {doubled}"


def test_the_ops_are_known() -> None:
    newest = releases.load(PROJECT).newest.xpu_kernels.version
    assert set(OPS.values()) <= ops(newest)


def functions(module: str) -> dict[str, str]:
    """Those of an overlay's module, as the parser sees them."""
    text = (PROJECT.root / "vllm_overlay/common" / module).read_text()
    found = (n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef))
    return {one.name: ast.dump(one) for one in found}


def test_the_policy_and_the_draft_agree_which_experts_are_kept() -> None:
    """Experts that one checks as MXFP4, the other must not read as NVFP4."""
    draft = functions("vllm/model_executor/model_loader/deepseek_v4_quantization.py")
    policy = functions("vllm_xpu_dsv4/checkpoint_config.py")
    del draft["draft_experts_config"]  # The policy asks, and builds no experts.
    assert "keeps_draft_experts" in draft
    assert {name: policy.get(name) for name in draft} == draft
