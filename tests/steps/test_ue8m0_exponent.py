# SPDX-License-Identifier: Apache-2.0
"""A UE8M0 scale is the least power of two that keeps its block within e4m3 or e2m1.

With amax = 448·2^k, or 6·2^k, that is 2^k; the next value needs 2^(k + 1). A rounded
log2 decides neither: just above a power of two its result is the integer itself, and
on a GPU, whose log2 may be off by some units in the last place, the result at a power
of two may lie above the integer. `Log2` stands for such a GPU under the interpreter.
"""

from typing import Any

import pytest
import torch
from helpers import compressor_run, e2m1_assembly, layout, model_configs, model_layers
from helpers.common_ops import TestDraft, TestMixedIndices, TestSharedOps  # noqa: F401

ops = layout.module(layout.OPS)
E4M3, E2M1 = 448.0, 6.0
LOWEST = -22
EXPONENTS = torch.arange(LOWEST, 97)
BLOCK_SIZE = 64


def at_powers(exponents: torch.Tensor, largest: float = E4M3) -> torch.Tensor:
    """largest·2^k, exact in bfloat16."""
    return torch.ldexp(
        torch.full_like(exponents, largest, dtype=torch.float32), exponents
    )


def least_exponent(amax: torch.Tensor, largest: float = E4M3) -> torch.Tensor:
    """The least k with amax ≤ largest·2^k, by comparison in float64."""
    k = torch.arange(-60, 119)
    return torch.searchsorted(at_powers(k, largest).double(), amax.double()) + k[0]


def check(scales: torch.Tensor, amax: torch.Tensor, largest: float = E4M3) -> None:
    """`scales`, fp32, are 2^least_exponent(amax)."""
    wanted = least_exponent(amax, largest)
    got = scales.cpu().double().log2()
    wrong = int((got != wanted).sum())
    print(f"figure: {wrong} of {amax.numel()} exponents differ")
    assert not wrong, f"{wrong} of {amax.numel()} exponents differ: {got - wanted}"


def from_bytes(encoded: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones(encoded.shape), encoded.cpu().int() - 127)


def blocks(amax: torch.Tensor, size: int) -> torch.Tensor:
    """`[len(amax), size]` in bfloat16: each row has its amax once, the rest below."""
    rows = (amax[:, None] * torch.linspace(-0.5, 0.5, size)).to(torch.bfloat16)
    rows[:, size // 3] = -amax
    return rows


def plain_rope(positions: int, dim: int = 64) -> torch.Tensor:
    """A table of cosines and sines that rotates nothing."""
    table = torch.zeros(positions, dim, device=layout.device())
    table[:, : dim // 2] = 1
    return table


def inserted_scales(amax: torch.Tensor) -> torch.Tensor:
    """The scales that the cache insert stores, seven a token."""
    padding = -amax.numel() % 7
    padded = torch.cat((amax, torch.ones(padding)))
    tokens = padded.numel() // 7
    k = torch.zeros(tokens, 512, dtype=torch.bfloat16)
    k[:, :448] = blocks(padded, 64).view(tokens, 448)
    cache = torch.zeros(1, BLOCK_SIZE * 584, dtype=torch.uint8, device=layout.device())
    slots = torch.arange(tokens, device=layout.device())
    ops.quantize_and_insert_k_cache(k.to(layout.device()), cache, slots, BLOCK_SIZE)
    stored = cache[0, BLOCK_SIZE * 576 :].view(BLOCK_SIZE, 8)[:tokens, :7]
    return from_bytes(stored).flatten()[: amax.numel()]


def indexer_query_scales(amax: torch.Tensor) -> torch.Tensor:
    """The scales that Triton folds into the weights of the indexer's query, one a
    token. XPU of later releases has an op of its own; the kernel is everyone's."""
    q = blocks(amax, 128)[:, None].to(layout.device())
    tokens = torch.zeros(len(amax), dtype=torch.int64, device=layout.device())
    weights = torch.ones(len(amax), 1, dtype=torch.bfloat16, device=layout.device())
    with layout.triton_indexer_query() as op:
        _, folded = op(tokens, q, plain_rope(1), weights, 1.0, 1.0)
    return folded[:, 0]


def mxfp4_query_scales(amax: torch.Tensor) -> torch.Tensor:
    """The scales of the indexer's query in MXFP4, four a token."""
    q = blocks(amax, 32).view(-1, 1, 128).to(layout.device())
    tokens = torch.zeros(len(q), dtype=torch.int64, device=layout.device())
    weights = torch.ones(len(q), 1, dtype=torch.bfloat16, device=layout.device())
    with layout.triton_indexer_query() as op, e2m1_assembly.interpreted():
        (_, scales), _ = op(tokens, q, plain_rope(1), weights, 1.0, 1.0, use_fp4=True)
    return from_bytes(scales.contiguous().view(torch.uint8)).flatten()


def inverse_rope_scales(amax: torch.Tensor) -> torch.Tensor:
    """The scales of the attention output after inverse RoPE, one a token.

    The cosine makes the fp32 maximum of the block `amax`, but for one rounding.
    """
    power = at_powers(least_exponent(amax))
    o = torch.zeros(len(amax), 1, 512, dtype=torch.bfloat16)
    o[:, 0, 448] = power
    table = plain_rope(len(amax))
    table[:, 0] = (amax / power).to(table.device)
    tokens = torch.arange(len(amax), device=layout.device())
    _, scales = ops.fused_inv_rope_fp8_quant(
        o.to(layout.device()), tokens, table, n_groups=1, heads_per_group=1
    )
    return scales[:, 0, 3]


def compressed_scales(amax: torch.Tensor, compressor: Any, config: Any) -> torch.Tensor:
    """The scales, as bytes, that a ratio-4 compressor stores for one entry.

    All partial states are 1, so that the entry is the weight of its norm.
    """
    size = min(compressor._quant_block, 64)
    weight = torch.zeros(compressor.head_dim)
    weight[: amax.numel() * size] = blocks(amax, size).flatten()
    compressor.norm.weight.data = weight.to(layout.device())
    compressor.ape.data.zero_()
    kv_score = torch.ones(8, 4 * compressor.head_dim)
    kv_score[:, 2 * compressor.head_dim :] = 0
    with e2m1_assembly.interpreted():
        written = compressor_run.run(config, compressor, kv_score, plain_rope(8), [8])
    return written.scales[1]


@pytest.fixture
def coarse_log2(monkeypatch: pytest.MonkeyPatch) -> None:
    """log2 one unit in the last place too large, where kernels are interpreted."""
    interpreter = layout.module("triton.runtime.interpreter")

    def create_log2(self: Any, x: Any) -> Any:
        exact = torch.as_tensor(x.data).log2()
        above = torch.nextafter(exact, torch.tensor(torch.inf)).numpy()
        return interpreter.TensorHandle(above, x.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_log2", create_log2)


def test_inverse_rope_just_above_a_power_of_two() -> None:
    k = EXPONENTS[::4]
    amax = torch.nextafter(at_powers(k), torch.tensor(torch.inf))
    check(inverse_rope_scales(amax), amax)


@pytest.mark.usefixtures("coarse_log2")
def test_inverse_rope_at_a_power_of_two() -> None:
    amax = at_powers(EXPONENTS[::4])
    check(inverse_rope_scales(amax), amax)


@pytest.mark.usefixtures("coarse_log2")
def test_cache_insert_at_a_power_of_two() -> None:
    amax = at_powers(EXPONENTS)
    check(inserted_scales(amax), amax)


@pytest.mark.usefixtures("coarse_log2")
def test_indexer_query_at_a_power_of_two() -> None:
    amax = at_powers(EXPONENTS[::4])
    check(indexer_query_scales(amax), amax)


@pytest.mark.usefixtures("coarse_log2")
def test_mxfp4_query_at_a_power_of_two() -> None:
    amax = at_powers(EXPONENTS[:92:4], E2M1)[:20]
    check(mxfp4_query_scales(amax), amax, E2M1)


@pytest.mark.usefixtures("coarse_log2")
def test_compressor_at_a_power_of_two() -> None:
    amax = at_powers(torch.tensor([-22, -13, -1, 0, 1, 5, 17]))
    config = model_configs.vllm_config()
    compressor = model_layers.compressor(config, indexer=False)
    check(from_bytes(compressed_scales(amax, compressor, config)[:7]), amax)


@pytest.mark.usefixtures("coarse_log2")
def test_indexer_compressor_at_a_power_of_two() -> None:
    amax = at_powers(torch.tensor([-3]))
    config = model_configs.vllm_config()
    compressor = compressor_run.of_indexer(config, mxfp4=False)
    check(compressed_scales(amax, compressor, config).view(torch.float32), amax)


@pytest.mark.usefixtures("coarse_log2")
def test_mxfp4_indexer_compressor_at_a_power_of_two() -> None:
    amax = at_powers(torch.tensor([-22, -1, 0, 17]), E2M1)
    config = model_configs.vllm_config()
    compressor = compressor_run.of_indexer(config, mxfp4=True)
    check(from_bytes(compressed_scales(amax, compressor, config)), amax, E2M1)


@pytest.mark.unchanged
@pytest.mark.parametrize(
    "scales", [inserted_scales, indexer_query_scales, inverse_rope_scales]
)
def test_other_values_keep_their_exponents(scales: Any) -> None:
    torch.manual_seed(0)
    mantissa = torch.randint(128, 256, (28,)).float() / 128
    amax = torch.ldexp(mantissa, torch.randint(-13, 100, (28,)))
    check(scales(amax), amax)
