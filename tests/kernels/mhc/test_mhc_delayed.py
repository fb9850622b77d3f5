# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections with delayed gates against float64."""

import pytest
import torch
from compare import assert_close
from inputs import strided
from mhc_inputs import EPS, case, mixed

from kernels.reference.mhc import mhc_delayed as reference
from kernels.xpu_dsv4.mhc import _mhc_launch, mhc, mhc_delayed

NAMES = ("post", "comb", "layer_input", "next_pre_mix")
SIZES = [(1, 5120), (3, 4096), (7, 192), (63, 96), (65, 80)]
WIDE = (513, 40)
"""More than 512 tokens are projected in tiles of 32. test_mhc.py shows it of streams
without a mix; nothing else depends on the tile."""
TINY = 1e-20
"""DeepSeek-V4.1's rms_norm_eps."""


def pre_gates(tokens, device):
    """Gates of the sublayer before."""
    return (torch.rand(tokens, 4) + 0.1).to(device)


def norm(hidden, device):
    return {
        "norm_weight": (torch.rand(hidden) + 0.5).bfloat16().to(device),
        "norm_eps": TINY,
    }


def assert_results(mine, want, gate_bound=1e-4):
    for name, a, b in zip(NAMES, mine, want, strict=True):
        if name == "layer_input":
            assert a.dtype == torch.bfloat16
            # Two roundings to bf16, where the input is normalized.
            bound = 0.01 * float(b.abs().max())
            assert_close(a, b, absolute=bound, relative=4e-3, name=name)
        else:
            assert a.dtype == torch.float32
            assert_close(a, b, absolute=gate_bound, relative=gate_bound, name=name)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(("tokens", "hidden"), SIZES)
def test_pre(tokens, hidden, normed, device):
    torch.manual_seed(hidden)
    arguments = (*case((tokens,), hidden, device), *EPS, pre_gates(tokens, device))
    options = norm(hidden, device) if normed else {}
    mine = mhc_delayed.mhc_pre_delayed(*arguments, **options)
    assert_results(mine, reference.mhc_pre_delayed(*arguments, **options))


@pytest.mark.parametrize(("tokens", "hidden"), [*SIZES, WIDE])
def test_fused_post_pre(tokens, hidden, device):
    torch.manual_seed(hidden + 1)
    residual, *gates = case((tokens,), hidden, device)
    spread = mixed((tokens,), hidden, device)
    arguments = (spread[0], residual, *spread[1:])
    rest = (*gates, *EPS, pre_gates(tokens, device))
    options = norm(hidden, device)
    streams, *mine = mhc_delayed.mhc_fused_post_pre_delayed(
        *arguments, *rest, **options
    )
    want, *whole = reference.mhc_fused_post_pre_delayed(*arguments, *rest, **options)
    assert_close(streams, want, absolute=0.05, relative=3e-3, name="residual")
    assert_results(mine, reference.mhc_pre_delayed(streams, *rest, **options))
    assert_results(mine, whole, gate_bound=3e-3)


@pytest.mark.parametrize(("tokens", "hidden"), [*SIZES, WIDE])
def test_entry_of_the_model(tokens, hidden, device):
    """The embedding, broadcast to the streams, is projected once by a folded fn."""
    torch.manual_seed(hidden + 2)
    x, *_ = mixed((tokens,), hidden, device)
    _, fn, scale, base = case((1,), hidden, device)
    residual = x.unsqueeze(1).expand(-1, 4, -1)
    folded = fn.unflatten(1, (4, hidden)).sum(1)
    options = norm(hidden, device)
    gates = (folded, scale, base, *EPS)
    mine = mhc_delayed.mhc_pre_delayed(residual, *gates, x=x, **options)
    assert_results(mine, reference.mhc_pre_delayed(residual, *gates, x=x, **options))
    whole = reference.mhc_pre_delayed(residual, fn, scale, base, *EPS, **options)
    assert_results(mine, whole)


def test_input_takes_the_gates_before(device):
    """A gate of 1 for one stream takes it as it is; the own gates go on."""
    torch.manual_seed(3)
    arguments = (*case((4,), 192, device), *EPS)
    for stream in range(4):
        chosen = torch.zeros(4, 4, device=device)
        chosen[:, stream] = 1
        _, _, taken, following = mhc_delayed.mhc_pre_delayed(*arguments, chosen)
        assert torch.equal(taken, arguments[0][:, stream])
        if stream == 0:
            none = mhc_delayed.mhc_pre_delayed(*arguments)
            assert torch.equal(none[2], taken)
        assert torch.equal(following, none[3])
    own = mhc.mhc_pre(*arguments)[2]
    late = mhc_delayed.mhc_pre_delayed(*arguments, following)[2]
    assert_close(late, own.double(), absolute=0.05, relative=3e-3)


def test_gates_are_those_of_v4(device):
    torch.manual_seed(4)
    arguments = (*case((5,), 192, device, amplitude=4.0), *EPS)
    mine = mhc_delayed.mhc_pre_delayed(*arguments)
    for a, b in zip(mine[:2], mhc.mhc_pre(*arguments)[:2], strict=True):
        assert torch.equal(a, b)


def test_rows_of_zeros_stay_zeros(device):
    """A padded row is not divided by its norm, even at DeepSeek-V4.1's epsilon."""
    torch.manual_seed(5)
    residual, *gates = case((3,), 192, device)
    residual[1] = 0
    numbers = (TINY, *EPS[1:])
    arguments = (residual, *gates, *numbers, pre_gates(3, device))
    mine = mhc_delayed.mhc_pre_delayed(*arguments, **norm(192, device))
    assert not mine[2][1].any()
    assert all(torch.isfinite(part).all() for part in mine)


def test_every_epsilon_enters(device):
    torch.manual_seed(6)
    options = {**norm(128, device), "norm_eps": 0.75}
    arguments = (*case((3,), 128, device), 0.5, 0.25, 0.125, 1.5, 3)
    gates = pre_gates(3, device)
    mine = mhc_delayed.mhc_pre_delayed(*arguments, gates, **options)
    assert_results(mine, reference.mhc_pre_delayed(*arguments, gates, **options))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_bad_row_stays_alone(value, device):
    torch.manual_seed(7)
    residual, *gates = case((3,), 192, device)
    numbers = (*gates, *EPS, pre_gates(3, device))
    good = mhc_delayed.mhc_pre_delayed(residual, *numbers)
    residual[1, 2, 5] = value
    bad = mhc_delayed.mhc_pre_delayed(residual, *numbers)
    for a, b in zip(good, bad, strict=True):
        assert torch.equal(a[::2], b[::2])
    assert torch.isnan(bad[3][1]).all()


def test_strided(device):
    torch.manual_seed(8)
    residual, *gates = case((5,), 96, device)
    x, post, comb = mixed((5,), 96, device)
    before = pre_gates(5, device)
    turned = comb.transpose(-1, -2).contiguous().transpose(-1, -2)
    fused = mhc_delayed.mhc_fused_post_pre_delayed
    far = (strided(x), strided(residual), strided(post), turned)
    mine = fused(*far, *gates, *EPS, strided(before))
    want = fused(x, residual, post, comb, *gates, *EPS, before)
    for a, b in zip(mine, want, strict=True):
        assert torch.equal(a, b)
    folded = gates[0][:, :96]
    entry = mhc_delayed.mhc_pre_delayed
    numbers = (*gates[1:], *EPS)
    mine = entry(strided(residual), strided(folded), *numbers, x=strided(x))
    want = entry(residual, folded.contiguous(), *numbers, x=x)
    for a, b in zip(mine, want, strict=True):
        assert torch.equal(a, b)


def test_no_tokens(device):
    residual, *gates = case((0,), 96, device)
    x, post, comb = mixed((0,), 96, device)
    pre = mhc_delayed.mhc_pre_delayed(residual, *gates, *EPS)
    shapes = [(0, 4, 1), (0, 4, 4), (0, 96), (0, 4)]
    assert [t.shape for t in pre] == shapes
    fused = mhc_delayed.mhc_fused_post_pre_delayed(
        x, residual, post, comb, *gates, *EPS, pre_gates(0, device)
    )
    assert [t.shape for t in fused] == [(0, 4, 96), *shapes]


def test_two_launches(device, monkeypatch):
    launches = []

    class Counted:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            launches.append(grid)
            return self.kernel[grid]

    for module, name in (
        (_mhc_launch, "project_kernel"),
        (mhc_delayed, "delayed_kernel"),
    ):
        monkeypatch.setattr(module, name, Counted(getattr(module, name)))
    residual, *gates = case((2,), 96, device)
    x, post, comb = mixed((2,), 96, device)
    options = norm(96, device)
    mhc_delayed.mhc_pre_delayed(residual, *gates, *EPS, **options)
    mhc_delayed.mhc_fused_post_pre_delayed(
        x, residual, post, comb, *gates, *EPS, pre_gates(2, device), **options
    )
    assert len(launches) == 4


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("residual", lambda t: t.float(), "residual.dtype = torch.float32"),
        ("fn", lambda t: t[:, :96], "fn.shape = [24, 96]: expected [24, 384]"),
        ("pre_mix", lambda t: t[:, :3], "pre_mix.shape = [2, 3]: expected [2, 4]"),
        ("pre_mix", lambda t: t.bfloat16(), "pre_mix.dtype = torch.bfloat16"),
        ("norm_weight", lambda t: t[:5], "norm_weight.shape = [5]: expected [96]"),
        ("sinkhorn_repeat", lambda n: 0, "sinkhorn_repeat = 0: expected at least 1"),
        ("x", lambda _: torch.zeros(2, 5).bfloat16(), "x.shape = [2, 5]"),
        ("x", lambda _: torch.zeros(2, 96), "x.dtype = torch.float32"),
        ("x", lambda _: torch.zeros(2, 96).bfloat16(), "expected [24, 96]"),
    ],
)
def test_bad_input(name, spoil, message):
    cpu = torch.device("cpu")
    names = ("residual", "fn", "hc_scale", "hc_base")
    numbers = (
        "rms_eps",
        "hc_pre_eps",
        "hc_sinkhorn_eps",
        "hc_post_mult_value",
        "sinkhorn_repeat",
    )
    arguments = {
        **dict(zip(names, case((2,), 96, cpu), strict=True)),
        **dict(zip(numbers, EPS, strict=True)),
        **norm(96, cpu),
        "pre_mix": pre_gates(2, cpu),
        "x": None,
    }
    arguments[name] = spoil(arguments[name])
    with pytest.raises(ValueError) as error:
        mhc_delayed.mhc_pre_delayed(**arguments)
    assert message in str(error.value)
