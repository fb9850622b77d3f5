# SPDX-License-Identifier: Apache-2.0
"""Inverse RoPE of the attention output: FP8 bytes and scales, and bf16."""

import pytest
import torch
from compare import assert_close
from inputs import exact_table, rotary_table

from kernels.reference._rope import rotate
from kernels.reference.mla import inv_rope as reference
from kernels.xpu_dsv4.mla import inv_rope


def hard_outputs(tokens, heads, dim=512):
    o = torch.randn(tokens, heads, dim)
    o *= torch.ldexp(torch.ones(heads), torch.arange(heads) % 19 - 9)[:, None]
    o[0, 0] = 0.0
    o[0, -1, :128] = 448.0 * 2.0**-11
    o[-1, 0, 130] = -448.0 * 2.0**15
    o[-1, -1, 256:384] = torch.linspace(-1, 1, 128) * 2.0**-9
    o[-1, -1, 256] = 1.0
    o[tokens // 2, heads // 2] *= 2.0**-40
    return o.bfloat16()


def case(tokens, groups, per_group, table, device):
    return (
        hard_outputs(tokens, groups * per_group).to(device),
        torch.randint(0, 70, (tokens,)).to(device),
        table(70, 64, torch.device("cpu")).to(device),
        groups,
        per_group,
    )


def on_cpu(arguments):
    return [x.cpu() if isinstance(x, torch.Tensor) else x for x in arguments]


def as_bytes(x):
    return x.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("tokens", "groups", "per_group"),
    [(1, 8, 8), (3, 2, 4), (2, 16, 8), (5, 1, 8), (63, 1, 1), (111, 1, 1), (4, 3, 5)],
)
def test_fp8_bytes(tokens, groups, per_group, device):
    torch.manual_seed(tokens)
    arguments = case(tokens, groups, per_group, exact_table, device)
    codes, scales = inv_rope.inv_rope_fp8_quant(*arguments)
    want, want_scales = reference.inv_rope_fp8_quant(*on_cpu(arguments))
    width = per_group * 512
    assert codes.dtype == torch.float8_e4m3fn
    assert codes.shape == (tokens, groups, width)
    assert codes.stride() == (width, tokens * width, 1), "groups are outermost"
    assert torch.equal(as_bytes(codes), as_bytes(want))
    assert scales.dtype == want_scales.dtype and scales.shape == want_scales.shape
    assert torch.equal(scales.cpu(), want_scales)
    assert scales.transpose(0, 1).is_contiguous(), "groups are outermost"


def test_real_turns(device):
    """Real RoPE rounds in fp32: few codes may differ, by one, and no scale."""
    torch.manual_seed(2)
    arguments = case(9, 2, 8, rotary_table, device)
    codes, scales = inv_rope.inv_rope_fp8_quant(*arguments)
    want, want_scales = reference.inv_rope_fp8_quant(*on_cpu(arguments))
    assert torch.equal(scales.cpu(), want_scales)
    differ = as_bytes(codes) != as_bytes(want)
    assert differ.double().mean() < 1e-4
    step = as_bytes(codes)[differ].int() - as_bytes(want)[differ].int()
    assert (step.abs() <= 1).all()


@pytest.mark.parametrize(
    ("tokens", "groups", "per_group"), [(1, 8, 8), (3, 2, 4), (63, 1, 3), (4, 3, 5)]
)
def test_bf16(tokens, groups, per_group, device):
    torch.manual_seed(tokens)
    arguments = case(tokens, groups, per_group, rotary_table, device)
    mine = inv_rope.inv_rope_bf16(*arguments)
    want = reference.inv_rope_bf16(*on_cpu(arguments))
    assert mine.dtype == torch.bfloat16 and mine.transpose(0, 1).is_contiguous()
    heads = mine.unflatten(-1, (per_group, 512)), want.unflatten(-1, (per_group, 512))
    assert torch.equal(heads[0][..., :448].cpu(), heads[1][..., :448].bfloat16())
    scale = float(want.abs().max())
    assert_close(mine, want, absolute=2.0**-8 * scale, relative=3e-3)


def test_undoes_the_rotation(device):
    torch.manual_seed(3)
    x = torch.randn(6, 4, 512)
    positions = torch.randint(0, 70, (6,))
    table = rotary_table(70, 64, torch.device("cpu"))
    turned = rotate(x.double(), positions, table).bfloat16()
    arguments = [t.to(device) for t in (turned, positions, table)]
    back = inv_rope.inv_rope_bf16(*arguments, 2, 2).reshape(6, 4, 512)
    assert_close(back, x.double(), absolute=0.05, relative=4e-3)


def test_strided_and_unrotated(device):
    torch.manual_seed(4)
    o, positions, table, groups, per_group = case(5, 2, 3, exact_table, device)
    positions[2], positions[3] = -1, 70
    wide = torch.full((5, 9, 520), 77.0, device=device).bfloat16()
    wide[:, 2:8, 4:516] = o
    arguments = (wide[:, 2:8, 4:516], positions.int(), table, groups, per_group)
    codes, _ = inv_rope.inv_rope_fp8_quant(*arguments)
    want, _ = reference.inv_rope_fp8_quant(*on_cpu(arguments))
    assert torch.equal(as_bytes(codes), as_bytes(want))


@pytest.mark.parametrize("block", [64, 256])
def test_other_quantization_blocks(block, device):
    torch.manual_seed(5)
    arguments = (*case(3, 2, 2, exact_table, device), 448, 64, block)
    codes, scales = inv_rope.inv_rope_fp8_quant(*arguments)
    want, want_scales = reference.inv_rope_fp8_quant(*on_cpu(arguments))
    assert torch.equal(as_bytes(codes), as_bytes(want))
    assert torch.equal(scales.cpu(), want_scales)


def test_no_tokens(device):
    o, positions, table, *groups = case(2, 2, 2, exact_table, device)
    codes, scales = inv_rope.inv_rope_fp8_quant(o[:0], positions[:0], table, *groups)
    assert codes.shape == (0, 2, 1024) and scales.shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("index", "spoil", "message"),
    [
        (0, lambda c: c[0].float(), "o.dtype = torch.float32"),
        (0, lambda c: c[0][:, :3], "o.shape = [2, 3, 512]: expected [*, 4, 512]"),
        (0, lambda c: c[0][..., ::2], "o.shape = [2, 4, 256]"),
        (1, lambda c: c[1][:1], "positions.shape = [1]: expected [2]"),
        (2, lambda c: c[2][:, :32], "cos_sin_cache.shape = [70, 32]"),
        (5, lambda c: 440, "o.shape = [2, 4, 512]: expected [*, 4, 504]"),
        (7, lambda c: 96, "quant_group_size = 96: expected a power of two"),
    ],
)
def test_bad_input(index, spoil, message):
    arguments = [*case(2, 2, 2, exact_table, torch.device("cpu")), 448, 64, 128]
    arguments[index] = spoil(arguments)
    with pytest.raises(ValueError) as error:
        inv_rope.inv_rope_fp8_quant(*arguments)
    assert message in str(error.value)
