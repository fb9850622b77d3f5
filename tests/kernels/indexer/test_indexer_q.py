# SPDX-License-Identifier: Apache-2.0
"""Indexer queries: codes and scales bit by bit, weights against float64."""

import pytest
import torch
from compare import assert_close
from inputs import exact_table, rotary_table, strided

from kernels.reference._quant import e4m3_values
from kernels.reference.indexer import indexer_q as reference
from kernels.xpu_dsv4.indexer.indexer_q import fused_indexer_q_rope_quant

SOFTMAX, HEAD = 128**-0.5, 64**-0.5


def hard_queries(tokens, heads, dim=128):
    q = torch.randn(tokens, heads, dim)
    q *= torch.ldexp(torch.ones(heads), torch.arange(heads) % 13 - 6)[:, None]
    q[0, 0] = 0.0
    q[0, -1, : dim // 2] = 448.0 * 2.0**-5
    q[-1, -1, 0] = 6.0 * 2.0**9
    q[-1, 0, 1] = -448.0 * 2.0**12
    q[-1, 0, 2:40] = torch.linspace(-1, 1, 38)
    return q.bfloat16()


def case(tokens, heads, table, device, dim=128, rope=64):
    return (
        torch.randint(0, 70, (tokens,)).to(device),
        hard_queries(tokens, heads, dim).to(device),
        table(70, rope, torch.device("cpu")).to(device),
        torch.randn(tokens, heads).bfloat16().to(device),
        SOFTMAX,
        HEAD,
    )


def both(arguments, use_fp4):
    mine = fused_indexer_q_rope_quant(*arguments, use_fp4=use_fp4)
    cpu = [x.cpu() if isinstance(x, torch.Tensor) else x for x in arguments]
    return mine, reference.fused_indexer_q_rope_quant(*cpu, use_fp4=use_fp4)


def as_bytes(x):
    return x.cpu().contiguous().view(torch.uint8)


SHAPES = [(1, 64), (3, 64), (5, 8), (2, 128), (7, 9), (63, 1), (111, 2)]


@pytest.mark.parametrize(("tokens", "heads"), SHAPES)
def test_fp8_bytes(tokens, heads, device):
    torch.manual_seed(tokens)
    (codes, weights), (want, want_weights) = both(
        case(tokens, heads, exact_table, device), False
    )
    assert codes.dtype == torch.float8_e4m3fn and weights.dtype == torch.float32
    assert torch.equal(as_bytes(codes), as_bytes(want))
    assert_close(weights, want_weights, absolute=1e-3, relative=1e-6, name="weights")


@pytest.mark.parametrize(("tokens", "heads"), SHAPES)
def test_mxfp4_bytes(tokens, heads, device):
    torch.manual_seed(tokens)
    ((codes, scales), weights), ((want, want_scales), want_weights) = both(
        case(tokens, heads, exact_table, device), True
    )
    assert codes.dtype == torch.uint8 and codes.shape == (tokens, heads, 64)
    assert scales.dtype == torch.int32 and scales.shape == (tokens, heads)
    assert torch.equal(as_bytes(codes), as_bytes(want))
    assert torch.equal(as_bytes(scales), as_bytes(want_scales))
    assert_close(weights, want_weights, absolute=1e-6, relative=1e-6, name="weights")


@pytest.mark.parametrize("use_fp4", [False, True], ids=["fp8", "mxfp4"])
def test_real_turns(use_fp4, device):
    """Real RoPE rounds in fp32: at most one code in a thousand may differ, by one."""
    torch.manual_seed(2)
    arguments = case(37, 64, rotary_table, device)
    (codes, weights), (want, want_weights) = both(arguments, use_fp4)
    if use_fp4:
        (codes, scales), (want, want_scales) = codes, want
        assert torch.equal(as_bytes(scales), as_bytes(want_scales))
    assert_close(weights, want_weights, absolute=1e-3, relative=1e-6, name="weights")
    differ = as_bytes(codes) != as_bytes(want)
    assert differ.double().mean() < 1e-3
    if not use_fp4:
        step = as_bytes(codes)[differ].int() - as_bytes(want)[differ].int()
        assert (step.abs() <= 1).all()


def test_folded_scale_restores_the_query(device):
    torch.manual_seed(3)
    arguments = list(case(4, 64, rotary_table, device))
    arguments[3] = torch.ones(4, 64, device=device)
    codes, weights = fused_indexer_q_rope_quant(*arguments)
    scale = weights.double().cpu() / (SOFTMAX * HEAD)
    exponent = scale.log2().round().long()[..., None] + 127
    turned = e4m3_values(as_bytes(codes), exponent)
    want = arguments[1].double().cpu()[..., :64]
    bound = want.abs() * 2.0**-4 + 2.0 ** (exponent - 127 - 9)
    assert ((turned[..., :64] - want).abs() <= bound).all()


@pytest.mark.parametrize("use_fp4", [False, True], ids=["fp8", "mxfp4"])
def test_strided_and_unrotated(use_fp4, device):
    torch.manual_seed(4)
    positions, q, table, weights, *scales = case(9, 5, exact_table, device)
    positions[3], positions[4] = -1, 70
    wide = strided(weights, 3)
    arguments = (positions.int(), strided(q), table, wide, *scales)
    (codes, got), (want, want_weights) = both(arguments, use_fp4)
    if use_fp4:
        codes, want = codes[0], want[0]
    assert torch.equal(as_bytes(codes), as_bytes(want))
    assert_close(got, want_weights, absolute=1e-3, relative=1e-6)


@pytest.mark.parametrize(("dim", "rope"), [(64, 64), (256, 64), (128, 0)])
def test_other_sizes(dim, rope, device):
    torch.manual_seed(5)
    for use_fp4 in (False, True):
        if use_fp4 and dim < 128:
            continue
        (codes, _), (want, _) = both(
            case(3, 6, exact_table, device, dim, rope), use_fp4
        )
        if use_fp4:
            assert torch.equal(as_bytes(codes[1]), as_bytes(want[1]))
            codes, want = codes[0], want[0]
        assert torch.equal(as_bytes(codes), as_bytes(want))


def test_no_tokens(device):
    positions, q, table, weights, *scales = case(2, 4, exact_table, device)
    empty = (positions[:0], q[:0], table, weights[:0], *scales)
    codes, out = fused_indexer_q_rope_quant(*empty)
    assert codes.shape == (0, 4, 128) and out.shape == (0, 4)


@pytest.mark.parametrize(
    ("index", "spoil", "message"),
    [
        (0, lambda c: c[0][:1], "positions.shape = [1]: expected [2]"),
        (0, lambda c: c[0].float(), "positions.dtype = torch.float32"),
        (1, lambda c: c[1].float(), "index_q.dtype = torch.float32"),
        (1, lambda c: c[1][0], "index_q.shape = [4, 128]"),
        (1, lambda c: c[1][..., :96], "index_q.shape[2] = 96"),
        (2, lambda c: torch.zeros(9, 130), "index_q_cos_sin_cache.shape[-1] = 130"),
        (3, lambda c: c[3][:, :2], "index_weights.shape = [2, 2]: expected [2, 4]"),
        (3, lambda c: c[3].half(), "index_weights.dtype = torch.float16"),
    ],
)
def test_bad_input(index, spoil, message):
    arguments = list(case(2, 4, exact_table, torch.device("cpu")))
    arguments[index] = spoil(arguments)
    with pytest.raises(ValueError) as error:
        fused_indexer_q_rope_quant(*arguments)
    assert message in str(error.value)
