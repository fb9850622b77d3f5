# SPDX-License-Identifier: Apache-2.0
"""A UE8M0 scale is the least power of two that keeps its block within e4m3.

With amax = 448·2^k that is 2^k, and the next fp32 value needs 2^(k + 1). A rounded
log2 decides neither: just above a power of two its result is the integer itself, and
on a GPU, whose log2 may be off by some units in the last place, the result at a power
of two may lie above the integer. `Log2` stands for such a GPU under the interpreter.
"""

from types import SimpleNamespace
from typing import Any

import layout
import pytest
import torch

ops = layout.module(layout.OPS)
LARGEST = 448.0
LOWEST = -22
EXPONENTS = torch.arange(LOWEST, 97)
BLOCK_SIZE = 64


def at_powers(exponents: torch.Tensor) -> torch.Tensor:
    """448·2^k, exact in bfloat16."""
    return torch.ldexp(
        torch.full_like(exponents, LARGEST, dtype=torch.float32), exponents
    )


def least_exponent(amax: torch.Tensor) -> torch.Tensor:
    """The least k with amax ≤ 448·2^k, by comparison in float64."""
    k = torch.arange(-60, 121)
    return torch.searchsorted(at_powers(k).double(), amax.double()) + k[0]


def check(scales: torch.Tensor, amax: torch.Tensor) -> None:
    """`scales`, fp32, are 2^least_exponent(amax)."""
    wanted = least_exponent(amax)
    got = scales.cpu().double().log2()
    wrong = int((got != wanted).sum())
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
    module = layout.module(f"{layout.OPS}.fused_indexer_q")
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(module, "current_platform"):
            other = layout.another_platform(module.current_platform)
            patch.setattr(module, "current_platform", other)
        _, folded = module.fused_indexer_q_rope_quant(
            tokens, q, plain_rope(1), weights, 1.0, 1.0
        )
    return folded[:, 0]


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


def compressed_scales(amax: torch.Tensor, indexer: bool) -> torch.Tensor:
    """The scales that the compressor of a ratio-4 layer stores for one entry: seven
    UE8M0 bytes, or the one fp32 scale of the indexer's entry.

    All partial states are 1, so that the entry is the weight of its norm.
    """
    config = layout.vllm_config()
    compressor = layout.compressor(config, indexer=indexer)
    head, data, scale = (128, 128, 4) if indexer else (512, 576, 8)
    device = layout.device()
    weight = torch.zeros(head)
    weight[: amax.numel() * (head // 2 if indexer else 64)] = blocks(
        amax, head // 2 if indexer else 64
    ).flatten()
    compressor.norm.weight.data = weight.to(device)
    compressor.ape.data.zero_()
    compressor.state_cache.kv_cache = torch.zeros(2, 8, 4 * head, device=device)
    page = torch.zeros(1, BLOCK_SIZE, data + scale, dtype=torch.uint8, device=device)
    context = config.compilation_config.static_forward_context
    context[compressor.k_cache_prefix].kv_cache = page
    slots = torch.arange(8, device=device)
    state = SimpleNamespace(
        token_to_req_indices=torch.zeros(8, dtype=torch.int32, device=device),
        slot_mapping=slots + 8,
        block_table=torch.ones(1, 1, dtype=torch.int32, device=device),
        block_size=8,
        num_decode_tokens=0,
    )
    metadata = {
        compressor.state_cache.prefix: state,
        compressor.k_cache_prefix: SimpleNamespace(slot_mapping=slots // 4),
    }
    kv_score = torch.ones(8, 4 * head, device=device)
    kv_score[:, 2 * head :] = 0
    run(compressor, config, metadata, kv_score, slots)
    stored = page.flatten()[BLOCK_SIZE * data :].view(BLOCK_SIZE, scale)[1].cpu()
    return stored.view(torch.float32) if indexer else from_bytes(stored[:7])


def run(
    compressor: Any,
    config: Any,
    metadata: dict[str, Any],
    kv_score: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    from vllm.forward_context import set_forward_context

    rope = SimpleNamespace(cos_sin_cache=plain_rope(len(positions)))
    with layout.current(config), set_forward_context(metadata, config):
        compressor(kv_score, positions, rope)


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
def test_compressor_at_a_power_of_two() -> None:
    amax = at_powers(torch.tensor([-22, -13, -1, 0, 1, 5, 17]))
    check(compressed_scales(amax, indexer=False), amax)


@pytest.mark.usefixtures("coarse_log2")
def test_indexer_compressor_at_a_power_of_two() -> None:
    amax = at_powers(torch.tensor([-3]))
    check(compressed_scales(amax, indexer=True), amax)


@pytest.mark.unchanged
@pytest.mark.parametrize(
    "scales", [inserted_scales, indexer_query_scales, inverse_rope_scales]
)
def test_other_values_keep_their_exponents(scales: Any) -> None:
    torch.manual_seed(0)
    mantissa = torch.randint(128, 256, (28,)).float() / 128
    amax = torch.ldexp(mantissa, torch.randint(-13, 100, (28,)))
    check(scales(amax), amax)
