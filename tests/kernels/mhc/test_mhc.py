# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections against float64."""

import pytest
import torch
from compare import assert_close
from inputs import strided
from mhc_inputs import EPS, case, mixed

from kernels.reference.mhc import mhc as reference
from kernels.xpu_dsv4.mhc import _mhc_launch, mhc, mhc_head

NAMES = ("post", "comb", "layer_input")


def assert_gates(mine, want, gate_bound=1e-4):
    for name, a, b in zip(NAMES, mine, want, strict=True):
        if name == "layer_input":
            assert a.dtype == torch.bfloat16
            assert_close(
                a, b, absolute=0.01 * float(b.abs().max()), relative=3e-3, name=name
            )
        else:
            assert a.dtype == torch.float32
            assert_close(a, b, absolute=gate_bound, relative=gate_bound, name=name)


SIZES = [((3,), 4096), ((1,), 7168), ((2, 3), 192), ((63,), 96)]


@pytest.mark.parametrize(("outer", "hidden"), SIZES)
def test_pre(outer, hidden, device):
    torch.manual_seed(hidden)
    arguments = case(outer, hidden, device)
    assert_gates(mhc.mhc_pre(*arguments, *EPS), reference.mhc_pre(*arguments, *EPS))


@pytest.mark.parametrize("tokens", [65, 513])
def test_pre_with_wide_chunks_and_tiles(tokens, device):
    """More tokens take other chunks and tiles; 513 is one more than a full set."""
    torch.manual_seed(tokens)
    arguments = case((tokens,), 640 if tokens < 512 else 80, device)
    assert_gates(mhc.mhc_pre(*arguments, *EPS), reference.mhc_pre(*arguments, *EPS))


@pytest.mark.parametrize("rounds", [1, 2, 20])
def test_sinkhorn_rounds(rounds, device):
    torch.manual_seed(rounds)
    arguments = (*case((5,), 128, device, amplitude=4.0), *EPS[:4], rounds)
    mine = mhc.mhc_pre(*arguments)
    assert_gates(mine, reference.mhc_pre(*arguments))
    columns = mine[1].sum(-2).cpu()
    assert (columns - 1).abs().max() < 1e-3, "the last step normalizes columns"


def test_every_epsilon_enters(device):
    torch.manual_seed(9)
    arguments = (*case((3,), 128, device), 0.5, 0.25, 0.125, 1.5, 3)
    assert_gates(mhc.mhc_pre(*arguments), reference.mhc_pre(*arguments))


def test_projection_keeps_fp32_weights(device):
    """A weight enters with more than 16 bits: bf16 or TF32 weights would show."""
    torch.manual_seed(10)
    residual, fn, scale, base = case((4,), 256, device, amplitude=8.0)
    arguments = (residual, fn, scale, base, *EPS)
    bound = 1e-4
    assert_gates(mhc.mhc_pre(*arguments), reference.mhc_pre(*arguments), bound)
    rounded = reference.mhc_pre(residual, fn.bfloat16().float(), scale, base, *EPS)
    exact = reference.mhc_pre(*arguments)
    assert (rounded[0] - exact[0]).abs().max() > 3 * bound


@pytest.mark.parametrize("hidden", [4096, 7168, 80])
def test_norm_weight(hidden, device):
    torch.manual_seed(11)
    arguments = case((2,), hidden, device)
    norm = {"norm_weight": torch.rand(hidden, device=device).bfloat16()}
    norm["norm_eps"] = 1e-6
    mine = mhc.mhc_pre(*arguments, *EPS, **norm)
    want = reference.mhc_pre(*arguments, *EPS, **norm)
    for name, a, b in zip(NAMES[:2], mine, want, strict=False):
        assert_close(a, b, absolute=1e-4, relative=1e-4, name=name)
    # Two roundings to bf16: of the input and of its normalized value.
    assert_close(mine[2], want[2], absolute=0.05, relative=4e-3, name="layer_input")


def test_norm_weight_with_a_stride_is_refused(device):
    arguments = case((2,), 96, device)
    weight = torch.rand(96, 2, device=device).bfloat16()[:, 0]
    with pytest.raises(ValueError, match=r"norm_weight.stride\(\) = \(2,\)"):
        mhc.mhc_pre(*arguments, *EPS, norm_weight=weight, norm_eps=1e-6)


@pytest.mark.parametrize(("outer", "hidden"), [*SIZES, ((111,), 40)])
def test_post(outer, hidden, device):
    torch.manual_seed(hidden)
    residual = case(outer, hidden, device)[0]
    x, post, comb = mixed(outer, hidden, device)
    mine = mhc.mhc_post(x, residual, post, comb)
    want = reference.mhc_post(x, residual, post, comb)
    assert mine.dtype == torch.bfloat16
    assert_close(mine, want, absolute=0.05, relative=3e-3)
    flat = mhc.mhc_post(x, residual, post.squeeze(-1), comb)
    assert torch.equal(flat, mine)


@pytest.mark.parametrize(("outer", "hidden"), [*SIZES, ((65,), 80)])
def test_fused_post_pre(outer, hidden, device):
    torch.manual_seed(hidden)
    residual, *gates = case(outer, hidden, device)
    x, post, comb = mixed(outer, hidden, device)
    streams, *mine = mhc.mhc_fused_post_pre(x, residual, post, comb, *gates, *EPS)
    arguments = (x, residual, post, comb)
    want = reference.mhc_post(*arguments)
    assert_close(streams, want, absolute=0.05, relative=3e-3, name="residual")
    alone = mhc.mhc_post(*arguments)
    assert (streams != alone).double().mean() < 1e-3, "fused or not, one rounding"
    assert_gates(mine, reference.mhc_pre(streams, *gates, *EPS))
    whole = reference.mhc_fused_post_pre(*arguments, *gates, *EPS)
    assert_gates(mine, whole[1:], gate_bound=3e-3)


@pytest.mark.parametrize(("outer", "hidden"), [*SIZES, ((65,), 80)])
def test_head(outer, hidden, device):
    torch.manual_seed(hidden)
    arguments = case(outer, hidden, device, gates=4, scales=1)
    mine = mhc_head.hc_head(*arguments, 1e-6, 1e-6)
    want = reference.hc_head(*arguments, 1e-6, 1e-6)
    assert mine.dtype == torch.bfloat16
    assert_close(mine, want, absolute=0.01 * float(want.abs().max()), relative=3e-3)


def test_strided(device):
    torch.manual_seed(12)
    residual, *gates = case((5,), 96, device)
    x, post, comb = mixed((5,), 96, device)
    wide, far = strided(residual), strided(x)
    turned = comb.transpose(-1, -2).contiguous().transpose(-1, -2)
    mine = mhc.mhc_fused_post_pre(far, wide, post, turned, *gates, *EPS)
    want = mhc.mhc_fused_post_pre(x, residual, post, comb, *gates, *EPS)
    for a, b in zip(mine, want, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(mhc.mhc_post(far, wide, post, turned), want[0])


def test_no_tokens(device):
    residual, *gates = case((0,), 96, device)
    x, post, comb = mixed((0,), 96, device)
    shapes = [t.shape for t in mhc.mhc_pre(residual, *gates, *EPS)]
    assert shapes == [(0, 4, 1), (0, 4, 4), (0, 96)]
    assert mhc.mhc_post(x, residual, post, comb).shape == (0, 4, 96)
    fused = mhc.mhc_fused_post_pre(x, residual, post, comb, *gates, *EPS)
    assert fused[3].shape == (0, 96)


def test_launches(device, monkeypatch):
    """Two launches before a sublayer, one after it, two for both at once."""
    torch.manual_seed(13)
    launches = []

    class Counted:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            launches.append(grid)
            return self.kernel[grid]

    for name in ("project_kernel", "finish_kernel", "post_kernel", "norm_kernel"):
        monkeypatch.setattr(_mhc_launch, name, Counted(getattr(_mhc_launch, name)))
    residual, *gates = case((2,), 96, device)
    x, post, comb = mixed((2,), 96, device)
    counts = []
    for call in (
        lambda: mhc.mhc_pre(residual, *gates, *EPS),
        lambda: mhc.mhc_post(x, residual, post, comb),
        lambda: mhc.mhc_fused_post_pre(x, residual, post, comb, *gates, *EPS),
        lambda: mhc.mhc_pre(
            residual, *gates, *EPS, norm_weight=gates[0][0, :96], norm_eps=1e-6
        ),
    ):
        launches.clear()
        call()
        counts.append(len(launches))
    assert counts == [2, 1, 2, 3]


@pytest.mark.parametrize(
    ("index", "spoil", "message"),
    [
        (0, lambda c: c[0].float(), "residual.dtype = torch.float32"),
        (0, lambda c: c[0][:, :3], "residual.shape = [2, 3, 96]: expected [..., 4,"),
        (1, lambda c: c[1][:, :96], "fn.shape = [24, 96]: expected [24, 384]"),
        (1, lambda c: c[1].bfloat16(), "fn.dtype = torch.bfloat16"),
        (2, lambda c: c[2][:1], "hc_scale.shape = [1]: expected [3]"),
        (3, lambda c: c[3][:4], "hc_base.shape = [4]: expected [24]"),
        (8, lambda c: 0, "sinkhorn_repeat = 0: expected at least 1"),
    ],
)
def test_bad_input_of_pre(index, spoil, message):
    arguments = [*case((2,), 96, torch.device("cpu")), *EPS]
    arguments[index] = spoil(arguments)
    with pytest.raises(ValueError) as error:
        mhc.mhc_pre(*arguments)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("index", "spoil", "message"),
    [
        (0, lambda c: c[0][:, :5], "x.shape = [2, 5]: expected [2, 96]"),
        (0, lambda c: c[0].float(), "x.dtype = torch.float32"),
        (2, lambda c: c[2][:, :3], "post_layer_mix.shape = [2, 3, 1]"),
        (3, lambda c: c[3][:, :3], "comb_res_mix.shape = [2, 3, 4]"),
        (3, lambda c: c[3].half(), "comb_res_mix.dtype = torch.float16"),
    ],
)
def test_bad_input_of_post(index, spoil, message):
    cpu = torch.device("cpu")
    x, post, comb = mixed((2,), 96, cpu)
    arguments = [x, case((2,), 96, cpu)[0], post, comb]
    arguments[index] = spoil(arguments)
    with pytest.raises(ValueError) as error:
        mhc.mhc_post(*arguments)
    assert message in str(error.value)
