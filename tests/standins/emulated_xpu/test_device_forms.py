# SPDX-License-Identifier: Apache-2.0
"""The stand-ins' device forms: they give what the stand-ins give, and nothing in them
waits for the device.

The second half runs each form on tensors without values: whatever asks for one raises,
and so does a tensor that is made on the CPU.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from standins.emulated_xpu.on_cuda import forms
from standins.emulated_xpu.on_cuda.forms.table import FORMS
from standins.emulated_xpu.wheel.implementations import IMPLEMENTATIONS

assert forms
HEADS, DIM = 8, 128
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
Call = tuple[str, list[Any], tuple[int, ...]]
"""An op, its arguments, and the numbers of those that it writes."""


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMULATED_XPU_KERNELS", "0.1.15.4")
    torch.manual_seed(0)


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(E4M3)


def powers(*shape: int) -> torch.Tensor:
    return torch.randint(120, 130, shape).to(torch.uint8).view(E8M0)


def table(rows: int, width: int) -> torch.Tensor:
    angle = torch.rand(rows, width // 2) * 6.3
    return torch.cat((angle.cos(), angle.sin()), -1)


def gemm() -> Call:
    a, b = fp8(5, 256), fp8(384, 256).T
    scales = torch.rand(5, 2), powers(2, 3).float()
    return "_xpu_C::fp8_gemm", [a, b, torch.bfloat16, *scales, None], ()


def bmm() -> Call:
    a, b = fp8(5, 2, 256).transpose(0, 1), fp8(2, 256, 384)
    scales = powers(2, 5, 2).float(), powers(2, 2, 3)
    return "_xpu_C::fp8_bmm", [a, b, torch.bfloat16, *scales, None], ()


def insert(slots: tuple[int, ...] = (3, -1, 17, 0, -1)) -> Call:
    tokens, block, page = len(slots), 4, 4 * 584 + 24
    raw = torch.randint(0, 256, (5 * page + 7,), dtype=torch.uint8)
    cache = raw.as_strided((5, block, 584), (page, 584, 1), 7)
    q, kv = torch.randn(tokens, 3, 512).bfloat16(), torch.randn(tokens, 512).bfloat16()
    where = torch.tensor(slots), torch.arange(tokens) + 2, table(9, 64)
    arguments = [q, kv, cache, *where, 1e-6, block, "fp8_ds_mla"]
    return "_xpu_C::deepseek_qnorm_rope_kv_insert", arguments, (0, 2)


def compress(ratio: int, lengths: tuple[int, ...], slotless: bool = False) -> Call:
    overlap, states, tokens = int(ratio == 4), 8, sum(lengths)
    width, page = (1 + overlap) * 512, 5 * 584 + 40
    blocks = -(-max(lengths) // states)
    order = torch.randperm(len(lengths) * blocks)
    state = torch.randn(len(order), states, 2 * width)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    slots = torch.arange(tokens)
    compressed = torch.full((tokens,), -1) if slotless else slots // ratio
    pages = tokens // 5 + 1
    raw = torch.randint(0, 256, (pages * page,), dtype=torch.uint8)
    cache = raw.as_strided((pages, 5, 584), (page, 584, 1))
    arguments = [state, owner.int(), positions, slots, order.view(-1, blocks).int()]
    arguments += [torch.rand(512) + 0.5, 1e-6, table(max(lengths), 64), cache]
    arguments += [compressed, 5, ratio, overlap, 64, 576, 8, page]
    return "_xpu_C::fused_kv_compress_norm_rope_insert_sparse_attn", arguments, (8,)


def keys(block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of `block` keys and their scales, and a table of three requests."""
    page = torch.cat((fp8(9, block * DIM).view(torch.uint8), scales(9, block)), 1)
    return page.view(9, block, DIM + 4), torch.randperm(9).view(3, 3).int()


def scales(*shape: int) -> torch.Tensor:
    return powers(*shape).float().view(torch.uint8)


def gather() -> Call:
    cache, blocks = keys(16)
    rows, ends = 60, torch.tensor([0, 20, 20, 53]).int()
    out = torch.randint(0, 256, (rows, DIM), dtype=torch.uint8).view(E4M3)
    scale = torch.randint(0, 256, (rows, 4), dtype=torch.uint8)
    name = "_C_cache_ops::cp_gather_indexer_k_quant_cache"
    return name, [cache, out, scale, blocks, ends], (1, 2)


def logits() -> Call:
    q, k, weights = fp8(7, HEADS, DIM), fp8(30, DIM), torch.randn(7, HEADS)
    starts, ends = torch.tensor([[0, 3, 9, 0, 0, 30, 5], [1, 9, 9, 30, 7, 30, 9]]).int()
    scale = powers(30).float()
    return "_xpu_C::fp8_mqa_logits", [q, k, scale, weights, starts, ends], ()


def paged_logits(next_n: int) -> Call:
    cache, blocks = keys(64)
    q, weights = fp8(3, next_n, HEADS, DIM), torch.randn(3 * next_n, HEADS)
    lengths = torch.tensor([192, 2, 65]).int()
    arguments = [q, cache[:, :, None], weights, lengths, blocks, None, 195]
    return "_xpu_C::fp8_paged_mqa_logits", arguments, ()


def top_prefill() -> Call:
    rows, ends = torch.tensor([0, 3, 9, 0]), torch.tensor([1, 33, 9, 40])
    out = torch.full((4, 16), 77, dtype=torch.int32)
    arguments = [torch.randn(4, 40), rows.int(), ends.int(), out, 4, 40, 1, 16]
    return "_C::top_k_per_row_prefill", arguments, (3,)


def top_decode(next_n: int, top_k: int) -> Call:
    out = torch.full((6, top_k), 77, dtype=torch.int32)
    lengths = torch.tensor([40, 1, 16][: 6 // next_n] + [20] * (6 // next_n - 3)).int()
    arguments = [torch.randn(6, 40), next_n, lengths, out, 6, 40, 1, top_k]
    return "_C::top_k_per_row_decode", arguments, (3,)


def router(padded: bool) -> Call:
    weights, ids = torch.empty(5, 4), torch.empty(5, 4, dtype=torch.int32)
    padding = torch.tensor([0, 1, 0, 0, 1]).bool() if padded else None
    arguments = [weights, ids, ids.clone(), torch.randn(5, 8), True, 1.5]
    arguments += [torch.randn(8), None, None, padding]
    return "_moe_C::topk_softplus_sqrt", arguments, (0, 1)


def remap(ids: list[list[int]]) -> Call:
    topk = torch.tensor(ids).int()
    rows = torch.full((topk.numel(), 32), 7.0).bfloat16()
    counts, position = torch.empty(8).int(), torch.empty(topk.shape).int()
    arguments = [torch.randn(len(topk), 32).bfloat16(), None, rows, None, None]
    arguments += [counts, position, topk, 8, 8]
    return "_moe_C::remap_hidden_states", arguments, (2, 5, 6)


def grouped() -> Call:
    weights = torch.randint(0, 256, (4, 64, 32), dtype=torch.uint8)
    rows, out = torch.randn(9, 64).bfloat16(), torch.zeros(9, 64).bfloat16()
    counts = torch.tensor([0, 5, 1, 3]).int()
    packed = weights.view(torch.float4_e2m1fn_x2)
    arguments = [rows, None, packed, powers(4, 64, 2), None, out, counts, 64, 64, 4]
    return "_xpu_C::cutlass_grouped_gemm_interface", arguments, (5,)


CALLS: dict[str, Callable[[], Call]] = {
    "gemm": gemm,
    "bmm": bmm,
    "insert": insert,
    "insert-no-slot": lambda: insert((-1, -1)),
    "insert-first-has-none": lambda: insert((-1, 0, 1)),
    "compress-4": lambda: compress(4, (5, 13, 1)),
    "compress-128": lambda: compress(128, (131, 260)),
    "compress-no-slot": lambda: compress(4, (9,), slotless=True),
    "gather": gather,
    "logits": logits,
    "paged-logits": lambda: paged_logits(1),
    "paged-logits-of-two": lambda: paged_logits(2),
    "top-prefill": top_prefill,
    "top-decode": lambda: top_decode(1, 16),
    "top-decode-of-two": lambda: top_decode(2, 16),
    "top-decode-of-all": lambda: top_decode(2, 64),
    "router": lambda: router(False),
    "router-padded": lambda: router(True),
    "remap": lambda: remap([[0, 3], [3, 7], [1, 0]]),
    "remap-padded": lambda: remap([[0, 3], [-1, -1], [1, 0]]),
    "grouped": grouped,
}
CLOSE = {"gemm", "logits", "paged-logits", "paged-logits-of-two", "grouped"}
"""Sums in another order, of terms of about one: equal to 2^-7 of the largest value,
which is bf16's own step."""
CODES = {"compress-4", "compress-128"}
"""Bytes of which one may be the neighbouring code, where a mean lies between two."""


COMPUTED = {**IMPLEMENTATIONS, **FORMS}
"""What computes an op on a device: the stand-in itself where it never waits."""


@pytest.mark.parametrize(
    "name", [name for name, call in CALLS.items() if not name.startswith("router")]
)
def test_a_form_gives_what_the_stand_in_gives(name: str) -> None:
    results = []
    for computed in (FORMS, IMPLEMENTATIONS):
        torch.manual_seed(0)
        op, arguments, written = CALLS[name]()
        returned = computed[op](*arguments)
        results.append([*(arguments[i] for i in written), returned])
    ours, theirs = results
    if name.startswith("remap"):
        known = int(theirs[1].sum())
        ours[0], theirs[0] = ours[0][:known], theirs[0][:known]
    for one, other in zip(ours, theirs, strict=True):
        if not isinstance(one, torch.Tensor):
            continue
        if name in CODES:
            assert code_steps(one, other) <= 1
        elif name in CLOSE:
            finite = other.isfinite()
            assert one.isfinite().equal(finite)
            off = (one.float() - other.float())[finite].abs().max()
            assert off <= 2**-7 * other.float()[finite].abs().max(), off
        else:
            assert plain(one).equal(plain(other))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def code_steps(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """How far apart the bytes are at most; half of them must be equal."""
    steps = (ours.int() - theirs.int()).abs()
    assert (steps == 0).float().mean() > 0.99
    # The bf16 part is a pair of bytes, where a carry reaches the upper one.
    return int(torch.minimum(steps, 256 - steps).max())


class NothingOnTheHost(TorchDispatchMode):
    """Raises where an op makes a tensor of the CPU with more than one value."""

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.is_cpu and made.dim():
                raise RuntimeError(f"{op} made a tensor on the host")
        return result


def without_values(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    size = value.untyped_storage().nbytes()
    raw = torch.empty(size, dtype=torch.uint8, device="meta").view(value.dtype)
    return raw.as_strided(value.shape, value.stride(), value.storage_offset())


def run_without_values(function: Callable[..., Any], arguments: list[Any]) -> None:
    given = [without_values(argument) for argument in arguments]
    with NothingOnTheHost():
        function(*given)


@pytest.mark.parametrize("name", CALLS)
def test_nothing_in_a_form_waits(name: str) -> None:
    op, arguments, _ = CALLS[name]()
    run_without_values(COMPUTED[op], arguments)


@pytest.mark.parametrize("name", ["gather", "paged-logits", "top-decode", "remap"])
def test_a_stand_in_that_waits_is_seen(name: str) -> None:
    op, arguments, _ = CALLS[name]()
    with pytest.raises((RuntimeError, NotImplementedError)):
        run_without_values(IMPLEMENTATIONS[op], arguments)
