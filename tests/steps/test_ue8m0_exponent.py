# SPDX-License-Identifier: Apache-2.0
"""A UE8M0 scale is the least power of two that keeps its block within e4m3 or e2m1.

With amax = 448·2^k, or 6·2^k, that is 2^k. A log2 that is off by one unit in the last
place may lie above the integer there; `coarse_log2` stands for such a device under the
interpreter.
"""

from typing import Any

import pytest
import torch
from helpers import compressor_run, e2m1_assembly, layout, model_configs
from helpers.coarse_log2 import (
    E2M1,
    E4M3,
    at_powers,
    blocks,
    check,
    choose_on_another_platform,
    coarse_log2,  # noqa: F401
    from_bytes,
    plain_rope,
)
from helpers.common_ops import TestCompressor  # noqa: F401

# Kind of a compressor, its options, the largest value of its format, amax a entry.
KINDS = [
    pytest.param({"head_dim": 512}, E4M3, 7, id="attention"),
    pytest.param({"head_dim": 128}, E4M3, 1, id="indexer"),
    pytest.param({"head_dim": 128, "mxfp4": True}, E2M1, 4, id="indexer-mxfp4"),
]
EXPONENTS = torch.tensor([-22, -13, -1, 0, 1, 5, 17])


def least_exponent(amax: torch.Tensor, largest: float = E4M3) -> torch.Tensor:
    """The least k with amax ≤ largest·2^k, by comparison in float64."""
    k = torch.arange(-60, 119)
    return torch.searchsorted(at_powers(k, largest).double(), amax.double()) + k[0]


def compressed_scales(
    options: dict[str, Any], amax: torch.Tensor, entry: int
) -> torch.Tensor:
    """The scales that a ratio-4 compressor stores, `entry` amax in each entry.

    All partial states are 1, so that an entry is the weight of its norm.
    """
    config = model_configs.vllm_config()
    compressor = compressor_run.build(config, **options)
    width = compressor.head_dim
    size = 32 if "mxfp4" in options else 64 if width == 512 else 128
    compressor.ape.data.zero_()
    kv_score = torch.ones(4, 4 * width)
    kv_score[:, 2 * width :] = 0
    scales = []
    for some in amax.split(entry):
        weight = torch.zeros(width)
        weight[: some.numel() * size] = blocks(some, size).flatten()
        compressor.norm.weight.data = weight.to(layout.device())
        with e2m1_assembly.interpreted():
            written = compressor_run.run(
                config, compressor, kv_score, plain_rope(4), [4]
            )
        row = written.scales[0]
        scales.append(
            row.view(torch.float32) if entry == 1 else from_bytes(row[: some.numel()])
        )
    return torch.cat(scales)


def query_scales(amax: torch.Tensor) -> torch.Tensor:
    """The scales that are folded into the weights of the indexer's query, one a
    token."""
    q = blocks(amax, 128)[:, None].to(layout.device())
    tokens = torch.zeros(len(amax), dtype=torch.int64, device=layout.device())
    weights = torch.ones(len(amax), 1, dtype=torch.bfloat16, device=layout.device())
    op = layout.common_op("fused_indexer_q_rope_quant")
    _, folded = op(tokens, q, plain_rope(1), weights, 1.0, 1.0)
    return folded[:, 0]


def mxfp4_query_scales(amax: torch.Tensor) -> torch.Tensor:
    """The scales of the indexer's query in MXFP4, four a token."""
    q = blocks(amax, 32).view(-1, 1, 128).to(layout.device())
    tokens = torch.zeros(len(q), dtype=torch.int64, device=layout.device())
    weights = torch.ones(len(q), 1, dtype=torch.bfloat16, device=layout.device())
    op = layout.common_op("fused_indexer_q_rope_quant")
    with e2m1_assembly.interpreted():
        (_, scales), _ = op(tokens, q, plain_rope(1), weights, 1.0, 1.0, use_fp4=True)
    return from_bytes(scales.contiguous().view(torch.uint8)).flatten()


@pytest.fixture
def another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are those of a platform that is not XPU, and so is who calls them."""
    compressor = layout.module(layout.COMPRESSOR)
    if hasattr(compressor, "current_platform"):
        other = layout.another_platform(compressor.current_platform)
        monkeypatch.setattr(compressor, "current_platform", other)
    choose_on_another_platform(monkeypatch, f"{layout.OPS}.fused_compress_quant_cache")


@pytest.mark.usefixtures("coarse_log2")
@pytest.mark.parametrize(("options", "largest", "entry"), KINDS)
def test_compressor_at_a_power_of_two(
    options: dict[str, Any], largest: float, entry: int
) -> None:
    scales = compressed_scales(options, at_powers(EXPONENTS, largest), entry)
    check(scales, EXPONENTS)


class TestIndexerQuery:
    """XPU of other releases has a kernel of its own for it."""

    __test__ = layout.INDEXER_QUERY_IN_TRITON

    @pytest.mark.usefixtures("coarse_log2")
    def test_at_a_power_of_two(self) -> None:
        exponents = torch.arange(-22, 97, 4)
        check(query_scales(at_powers(exponents)), exponents)

    @pytest.mark.usefixtures("coarse_log2")
    def test_mxfp4_at_a_power_of_two(self) -> None:
        exponents = torch.arange(-22, 58, 4)
        check(mxfp4_query_scales(at_powers(exponents, E2M1)), exponents)


@pytest.mark.unchanged
@pytest.mark.any_platform
@pytest.mark.usefixtures("coarse_log2", "another_platform")
@pytest.mark.parametrize(("options", "largest", "entry"), KINDS)
def test_other_platforms_keep_their_log2(
    options: dict[str, Any], largest: float, entry: int
) -> None:
    scales = compressed_scales(options, at_powers(EXPONENTS, largest), entry)
    check(scales, EXPONENTS + 1)


@pytest.mark.unchanged
@pytest.mark.any_platform
@pytest.mark.parametrize(("options", "largest", "entry"), KINDS)
def test_an_exact_log2_and_the_bits_agree(
    options: dict[str, Any], largest: float, entry: int
) -> None:
    """For every mantissa of a BF16 amax, and at each exponent for those beside the
    format's largest value: amax is a BF16 value, and a power of two scales exactly. Of
    one amax a launch, for every eighth mantissa and fewer exponents."""
    every, apart = (8, 12) if entry == 1 else (1, 3)
    mantissas = torch.arange(128, 256, every).float() / 128
    powers = at_powers(torch.arange(-10, 90, apart), largest)
    amax = torch.cat((mantissas, powers * (1 - 1 / 128), powers, powers * (1 + 1 / 64)))
    amax = amax.to(torch.bfloat16).float()
    check(compressed_scales(options, amax, entry), least_exponent(amax, largest))
