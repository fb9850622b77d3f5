# SPDX-License-Identifier: Apache-2.0
"""K and KV rows into FP8 pages, bit by bit; queries normalized and rotated in place."""

from collections import Counter

import pytest
import torch
from compare import assert_close
from inputs import exact_table, pages, raw_bytes, rotary_table, strided
from stores import counting_stores

from kernels.reference import _rope
from kernels.reference.kv import kv_quant
from kernels.reference.kv import qnorm_rope_kv_insert as reference_qnorm
from kernels.xpu_dsv4.kv import qnorm_rope_kv_insert

EPS = 1e-6
insert_qkv = qnorm_rope_kv_insert.xpu_qnorm_rope_kv_fp8_insert


def insert_k(
    k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, block_size: int = 64
) -> None:
    """Insert K rows that RoPE does not turn, beside queries that nobody reads."""
    tokens = len(k)
    q = torch.zeros(tokens, 1, 512, dtype=torch.bfloat16, device=k.device)
    no_turn = torch.tensor([[1.0] * 32 + [0.0] * 32], device=k.device)
    positions = torch.zeros(tokens, dtype=torch.int64, device=k.device)
    insert_qkv(q, k, cache, slots, positions, no_turn, EPS, block_size)


def hard_rows(count: int) -> torch.Tensor:
    """K rows with zeros, 448 * 2^k, neighbours, subnormal codes and huge values."""
    rows = torch.randn(count, 512)
    rows *= torch.ldexp(torch.ones(count), torch.arange(count) % 17 - 8)[:, None]
    rows[0, :64] = 0.0
    rows[0, 64:128] = -0.0
    for block in range(7):
        rows[1 % count, block * 64] = 448.0 * 2.0 ** (block - 20)
        rows[1 % count, block * 64 + 1 : block * 64 + 64] *= 2.0**-30
    rows[2 % count, 5] = 3.0e38
    rows[3 % count, :64] = torch.linspace(-1, 1, 64) * 2.0**-9
    rows[3 % count, 0] = 1.0
    return rows.bfloat16()


def slots_of(count: int, num_slots: int) -> torch.Tensor:
    """Distinct slots with -1, other negative ones and slots beyond the cache."""
    slots = torch.randperm(num_slots)[:count]
    slots[2::5] = -1
    slots[4::7] = num_slots + torch.arange(len(slots[4::7]))
    slots[6::11] = -7
    return slots


def insert_both(k, cache_shape, slots, block_size, flat, device):
    mine = pages(*cache_shape, device, flat=flat)
    want = pages(*cache_shape, torch.device("cpu"), flat=flat)
    insert_k(k, mine, slots.to(device), block_size)
    kv_quant.insert_rows(k.cpu().double(), want, slots.cpu(), block_size)
    return raw_bytes(mine), raw_bytes(want)


@pytest.mark.parametrize("flat", [False, True], ids=["3d", "2d"])
@pytest.mark.parametrize("block_size", [64, 256, 7, 2, 1])
def test_insert_k_bytes(block_size, flat, device):
    torch.manual_seed(block_size)
    blocks = max(2, 96 // block_size)
    slots = slots_of(31, blocks * block_size)
    k = hard_rows(33).to(device)
    mine, want = insert_both(k, (blocks, block_size), slots, block_size, flat, device)
    assert torch.equal(mine, want)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_insert_k_strided_and_int32(kind, device):
    torch.manual_seed(1)
    k = strided(hard_rows(9)).to(device)
    slots = slots_of(9, 30).to(kind)
    mine, want = insert_both(k, (5, 6), slots, 6, False, device)
    assert torch.equal(mine, want)


def test_insert_k_exact_powers(device):
    """amax = 448 * 2^k takes exponent k; the next bf16 value takes k + 1."""
    k = torch.arange(-21, 21)
    rows = torch.zeros(2 * len(k), 512)
    largest = torch.ldexp(torch.full((len(k),), 448.0), k)
    rows[: len(k), :448] = largest[:, None]
    rows[len(k) :, :448] = largest[:, None] * (1 + 2.0**-6)
    rows = rows.bfloat16().to(device)
    cache = pages(2, 64, device)
    slots = torch.arange(len(rows), device=device)
    insert_k(rows, cache, slots)
    raw = raw_bytes(cache).view(2, -1)
    scales = raw[:, 64 * 576 : 64 * 584].reshape(-1, 8)[: len(rows)]
    want = torch.cat((k, k + 1)) + 127
    assert torch.equal(scales[:, :7].long(), want[:, None].expand(-1, 7))
    assert not scales[:, 7].any()
    codes = raw[:, : 64 * 576].reshape(-1, 576)[: len(k), :448]
    assert (codes == 0x7E).all(), "448 * 2^k is the largest code itself"


def qkv_case(tokens, heads, device, table=rotary_table, block_size=64):
    q = torch.randn(tokens, heads, 512).bfloat16()
    blocks = max(2, -(-2 * tokens // block_size))
    slots = slots_of(tokens, blocks * block_size)
    cos_sin = table(300, 64, torch.device("cpu"))
    positions = torch.randint(0, 300, (tokens,))
    return (
        q.to(device),
        hard_rows(tokens).to(device),
        pages(blocks, block_size, device),
        slots.to(device),
        positions.to(device),
        cos_sin.to(device),
        EPS,
        block_size,
    )


def on_cpu(arguments):
    """A copy on the CPU that keeps gaps and strides."""
    copied = []
    for value in arguments:
        if isinstance(value, torch.Tensor):
            raw = raw_bytes(value).view(value.dtype)
            value = raw.as_strided(value.shape, value.stride(), value.storage_offset())
        copied.append(value)
    return copied


@pytest.mark.parametrize("norm_q", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("block_size", [64, 256, 5])
@pytest.mark.parametrize(
    ("tokens", "heads"), [(1, 8), (3, 64), (2, 128), (7, 9), (11, 1), (63, 2)]
)
def test_qnorm_rope_insert(tokens, heads, block_size, norm_q, device):
    torch.manual_seed(tokens)
    mine = qkv_case(tokens, heads, device, block_size=block_size)
    want = on_cpu(mine)
    kv = mine[1].clone()
    insert_qkv(*mine, norm_q)
    q = want[0].double()
    if norm_q:
        q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + EPS)
    q = _rope.rotate(q, want[4], want[5])
    reference_qnorm.xpu_qnorm_rope_kv_fp8_insert(*want, norm_q)
    assert_close(mine[0], q, absolute=0.02, relative=3e-3, name="q")
    assert torch.equal(mine[1], kv), "kv is an input"
    a, b = raw_bytes(mine[2]), raw_bytes(want[2])
    rope = rope_bytes(want[2], want[3], block_size)
    assert torch.equal(a[~rope], b[~rope]), "e4m3 codes, scales and all else"
    a, b = (x[rope].view(torch.bfloat16).double() for x in (a, b))
    off = (a - b).abs() > 2.0**-7 * b.abs()
    assert not off.any(), "rope values within one bf16 step"
    assert (a != b).double().mean() < 2e-3 if len(a) > 2000 else True


def rope_bytes(cache, slots, block_size):
    """Mask over the raw bytes: the bf16 values of the slots written."""
    mask = torch.zeros_like(raw_bytes(cache), dtype=torch.bool)
    for slot in slots.tolist():
        if 0 <= slot < cache.shape[0] * block_size:
            page = slot // block_size * cache.stride(0)
            start = page + slot % block_size * 576 + 448
            mask[start : start + 128] = True
    return mask


def test_qnorm_rope_insert_exact_turns(device):
    """Turns without rounding: every byte of the pages equals the reference's."""
    torch.manual_seed(5)
    mine = qkv_case(21, 4, device, table=exact_table, block_size=6)
    want = on_cpu(mine)
    insert_qkv(*mine)
    reference_qnorm.xpu_qnorm_rope_kv_fp8_insert(*want)
    assert torch.equal(raw_bytes(mine[2]), raw_bytes(want[2]))


def test_qnorm_rope_insert_strided_and_padded(device):
    """Strided q and kv, fewer slots than tokens, positions outside the table."""
    torch.manual_seed(6)
    q, kv, cache, slots, positions, cos_sin, eps, block = qkv_case(
        9, 5, device, table=exact_table
    )
    positions[1], positions[2] = -1, 300
    wide = torch.full((9, 7, 520), 77.0, device=device).bfloat16()
    wide[:, 1:6, 4:516] = q
    mine = (
        wide[:, 1:6, 4:516],
        strided(kv),
        cache,
        slots[:6],
        positions.int(),
        cos_sin,
        eps,
        block,
    )
    want = on_cpu(mine)
    insert_qkv(*mine)
    reference_qnorm.xpu_qnorm_rope_kv_fp8_insert(*want)
    assert torch.equal(raw_bytes(mine[2]), raw_bytes(want[2]))
    assert_close(mine[0], want[0], absolute=0.02, relative=1e-3, name="q")
    wide[:, 1:6, 4:516] = 77.0
    assert (wide == 77.0).all(), "nothing around q was written"


def test_no_address_stored_twice(device):
    """N5: no lane stores where another one does, in pages and in q."""
    if device.type != "cpu":
        pytest.skip("counting stores needs the interpreter")
    torch.manual_seed(7)
    case = list(qkv_case(6, 5, device, block_size=4))
    case[3] = torch.tensor([3, -1, 4, 0, 7, 10_000])
    with counting_stores() as counts:
        insert_qkv(*case)
    assert Counter(counts.values()) == {1: 6 * 5 * 1024 + 4 * 584}


def test_minus_one_writes_nothing(device):
    case = list(qkv_case(4, 1, device))
    case[3] = torch.full((4,), -1, device=device)
    before = raw_bytes(case[2])
    insert_qkv(*case)
    assert torch.equal(raw_bytes(case[2]), before)


def test_no_tokens(device):
    case = list(qkv_case(3, 2, device))
    insert_qkv(*(x[:0] if i in (0, 1, 3, 4) else x for i, x in enumerate(case)))


def test_property_based(device):
    hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is optional")
    st = hypothesis.strategies

    @hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
    @hypothesis.given(data=st.data())
    def check(data):
        block_size = data.draw(st.integers(1, 9))
        blocks = data.draw(st.integers(1, 4))
        total = blocks * block_size
        written = data.draw(
            st.lists(st.integers(0, total - 1), unique=True, max_size=4)
        )
        ignored = data.draw(
            st.lists(st.sampled_from([-1, -(2**40), total, 2**40]), max_size=3)
        )
        slots = torch.tensor(data.draw(st.permutations(written + ignored))).long()
        exponent = data.draw(st.integers(-30, 30))
        k = (torch.randn(len(slots), 512) * 2.0**exponent).bfloat16().to(device)
        mine, want = insert_both(
            k, (blocks, block_size), slots, block_size, False, device
        )
        assert torch.equal(mine, want)

    torch.manual_seed(8)
    check()


BAD = [
    ("q", lambda c: c[0].float(), "q.dtype = torch.float32: expected torch.bfloat16"),
    ("q", lambda c: c[0][..., :256], "q.shape = "),
    ("q", lambda c: c[0].transpose(1, 2).contiguous().transpose(1, 2), "q.stride"),
    ("kv", lambda c: c[1][:2], "kv.shape = [2, 512]: expected [3, 512]"),
    ("kv", lambda c: torch.zeros(3, 513).bfloat16()[:, :512], "kv.stride() = (513, 1)"),
    ("cache", lambda c: c[2].view(torch.int8), "swa_kv_cache.dtype = torch.int8"),
    ("cache", lambda c: c[2][:, :3], "swa_kv_cache.shape = [2, 3, 584]"),
    ("slots", lambda c: c[3].float(), "slot_mapping.dtype = torch.float32"),
    (
        "slots",
        lambda c: c[3].repeat(2),
        "slot_mapping.shape[0] = 6: expected at most 3",
    ),
    ("positions", lambda c: c[4][:1], "positions.shape = [1]: expected [3]"),
    ("cos_sin", lambda c: c[5][:, :32], "cos_sin_cache.shape = [300, 32]"),
    ("eps", lambda c: -1.0, "eps = -1.0: expected"),
    ("block", lambda c: 0, "block_size = 0: expected at least 1"),
    ("block", lambda c: 32, "swa_kv_cache.shape = [2, 64, 584]"),
]
NAMES = ["q", "kv", "cache", "slots", "positions", "cos_sin", "eps", "block"]


@pytest.mark.parametrize(("name", "spoil", "message"), BAD)
def test_bad_input(name, spoil, message, device):
    case = list(qkv_case(3, 2, torch.device("cpu")))
    case[NAMES.index(name)] = spoil(case)
    with pytest.raises(ValueError) as error:
        insert_qkv(*case)
    assert message in str(error.value)


def test_slots_of_another_device(device):
    case = list(qkv_case(3, 2, torch.device("cpu")))
    case[3] = case[3].to("meta")
    with pytest.raises(ValueError, match="device = meta: expected cpu"):
        insert_qkv(*case)
