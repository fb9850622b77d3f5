# SPDX-License-Identifier: Apache-2.0
"""The compressor's entries: which tokens make one, its bytes, and what is not written.

Where no sum is rounded, all bytes are those of the float64 reference.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from compare import assert_within
from fp8_pages import sparse_memory
from inputs import exact_table, pages, raw_bytes, rotary_table
from stores import counting_stores

from kernels.reference.kv import compressor as reference
from kernels.xpu_dsv4.kv import compressor

EPS = 1e-6
RATIOS = {4: True, 128: False}
CHANNELS = 512
SPANS = {
    4: ((0, 9), (3, 1), (5, 6), (12, 4), (0, 3), (7, 1)),
    128: ((0, 130), (127, 1), (250, 9), (383, 1), (3, 5)),
}
"""Ratio -> first position and tokens of each request."""


@dataclass
class Batch:
    """The arguments, by their names."""

    state_cache: torch.Tensor
    token_to_req_indices: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    rms_norm_weight: torch.Tensor
    rms_norm_eps: float
    cos_sin_cache: torch.Tensor
    k_cache: torch.Tensor
    kv_slot_mapping: torch.Tensor
    compress_ratio: int
    overlap: bool

    def arguments(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def run(self) -> None:
        compressor.compress_norm_rope_insert(**self.arguments())

    def on_cpu(self) -> "Batch":
        """A copy on the CPU that keeps gaps and strides."""
        copied = self.arguments()
        for name, x in copied.items():
            if isinstance(x, torch.Tensor):
                raw = raw_bytes(x).view(x.dtype)
                copied[name] = raw.as_strided(x.shape, x.stride(), x.storage_offset())
        return Batch(**copied)

    def ends(self) -> torch.Tensor:
        """Which of the tokens write an entry."""
        tokens = len(self.slot_mapping)
        at, slots = self.positions[:tokens], self.kv_slot_mapping[:tokens]
        ends = (at >= 0) & ((at + 1) % self.compress_ratio == 0)
        ends &= (self.slot_mapping >= 0) & (slots >= 0)
        return ends & (slots < self.k_cache.shape[0] * self.k_cache.shape[1])


def exact_rows(count: int, width: int, ratio: int) -> torch.Tensor:
    """States whose means are 1 or -1, without rounding, in every aligned block.

    Of half of the channels, the values of two neighbours have this mean and all scores
    are equal. Of the others, one token of the block decides: the softmax of the rest
    is 0 in fp32, and in float64 too little to be seen.
    """
    signs = torch.randint(0, 2, (width,)) * 2.0 - 1
    off = torch.randint(-7, 8, (-(-count // 2), 1, width)) / 8
    values = (signs + torch.cat((off, -off), 1)).flatten(0, 1)[:count]
    scores = torch.randn(width).expand(count, width).clone()
    decided = torch.rand(width) < 0.5
    winner = torch.randint(0, ratio, (-(-count // ratio), width))
    wins = winner.repeat_interleave(ratio, 0)[:count] == (
        torch.arange(count)[:, None] % ratio
    )
    scores += 300.0 * (wins & decided)
    values = torch.where(decided, torch.where(wins, signs, 40 * values), values)
    return torch.cat((values, scores), 1)


def random_rows(count: int, width: int, ratio: int) -> torch.Tensor:
    """Normal values and scores."""
    return torch.cat((torch.randn(count, width), 3 * torch.randn(count, width)), 1)


def hard_weight(dtype: torch.dtype) -> torch.Tensor:
    """Largest values of 448 * 2^k, or a bit more; small ones, and a block of zeros."""
    weight = torch.randn(CHANNELS)
    for block in range(7):
        part = weight[64 * block : 64 * block + 64]
        part.mul_(2.0 ** (3 * block - 14) / part.abs().max())
        part[block] = 448.0 * 2.0 ** (block - 9) * (1 + (block % 2) * 2.0**-6)
    weight[128:192] = 0.0
    return weight.to(dtype)


def make(
    ratio: int,
    device: torch.device,
    *,
    rows: Callable[[int, int, int], torch.Tensor] = exact_rows,
    spans: tuple[tuple[int, int], ...] | None = None,
    state_block: int = 8,
    block_size: int = 5,
    gap: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    padding: int = 0,
) -> Batch:
    """Requests that are at `spans`, with NaN in every row of no token.

    `padding` more positions and indices than slots end entries of no token.
    """
    exact = rows is exact_rows
    overlap = RATIOS[ratio]
    spans = spans or SPANS[ratio]
    width = (1 + overlap) * CHANNELS
    blocks = max(-(-(first + count) // state_block) for first, count in spans)
    places = torch.randperm(len(spans) * blocks).view(len(spans), blocks) + 1
    state = torch.full(
        (len(spans) * blocks + 2, state_block + 1, 2 * width + gap), torch.nan
    )[:, :state_block, : 2 * width]
    for request, (first, count) in enumerate(spans):
        at = torch.arange(first + count)
        taken = rows(len(at), width, ratio)
        state[places[request, at // state_block], at % state_block] = taken
    at = torch.cat([torch.arange(first, first + count) for first, count in spans])
    owner = torch.repeat_interleave(
        torch.arange(len(spans)), torch.tensor([count for _, count in spans])
    )
    tokens = len(at)
    pages_needed = -(-tokens // block_size) + 1
    more = torch.full((padding,), ratio - 1)
    table = torch.full((len(spans), blocks + 3), 1 << 20).int()[:, 1 : blocks + 1]
    table[:] = places
    return Batch(
        state_cache=state.to(device) if not gap else on_device(state, device),
        token_to_req_indices=torch.cat((owner, 0 * more)).int().to(device),
        positions=torch.cat((at, more)).to(device),
        slot_mapping=torch.arange(tokens).to(device),
        block_table=on_device(table, device),
        rms_norm_weight=hard_weight(dtype).to(device),
        rms_norm_eps=0.0 if exact else EPS,
        cos_sin_cache=(exact_table if exact else rotary_table)(400, 64, device),
        k_cache=pages(pages_needed, block_size, device),
        kv_slot_mapping=torch.randperm(pages_needed * block_size)[:tokens].to(device),
        compress_ratio=ratio,
        overlap=overlap,
    )


def on_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`x` and its gaps."""
    raw = raw_bytes(x).to(device).view(x.dtype)
    return raw.as_strided(x.shape, x.stride(), x.storage_offset())


def assert_same_bytes(batch: Batch) -> None:
    want = batch.on_cpu()
    batch.run()
    reference.compress_norm_rope_insert(**want.arguments())
    assert torch.equal(raw_bytes(batch.k_cache), raw_bytes(want.k_cache))


def entry_parts(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, rope values and exponents of what `batch` wrote."""
    slots = batch.kv_slot_mapping[: len(batch.slot_mapping)][batch.ends()].cpu()
    cache = batch.k_cache.cpu()
    block_size = cache.shape[1]
    flat = cache.flatten(1)[slots // block_size]
    data = flat[:, : block_size * 576].unflatten(1, (-1, 576))
    scales = flat[:, block_size * 576 :].unflatten(1, (-1, 8))
    entry, row = torch.arange(len(slots)), slots % block_size
    data = data[entry, row]
    rope = data[:, 448:].contiguous().view(torch.bfloat16)
    return data[:, :448], rope, scales[entry, row]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("ratio", RATIOS)
def test_bytes(ratio, dtype, device):
    torch.manual_seed(ratio)
    batch = make(ratio, device, dtype=dtype)
    assert 4 <= int(batch.ends().sum()) < len(batch.positions)
    assert_same_bytes(batch)


@pytest.mark.parametrize(
    ("state_block", "block_size"), [(1, 64), (3, 2), (4, 1), (7, 53), (64, 3)]
)
def test_odd_blocks(state_block, block_size, device):
    torch.manual_seed(state_block)
    assert_same_bytes(make(4, device, state_block=state_block, block_size=block_size))


def test_odd_blocks_of_a_long_window(device):
    torch.manual_seed(2)
    assert_same_bytes(make(128, device, spans=((200, 57),), state_block=5))


@pytest.mark.parametrize("ratio", RATIOS)
def test_strided_states(ratio, device):
    torch.manual_seed(3)
    spans = SPANS[ratio][-2:] if ratio == 128 else SPANS[ratio]
    assert_same_bytes(make(ratio, device, spans=spans, gap=6))


def test_int32_metadata_and_bf16_table(device):
    torch.manual_seed(4)
    batch = make(4, device)
    assert_same_bytes(
        replace(
            batch,
            positions=batch.positions.int(),
            slot_mapping=batch.slot_mapping.int(),
            kv_slot_mapping=batch.kv_slot_mapping.int(),
            token_to_req_indices=batch.token_to_req_indices.long(),
            block_table=batch.block_table.long(),
            cos_sin_cache=batch.cos_sin_cache.bfloat16(),
        )
    )


@pytest.mark.parametrize("scores", ["normal", "rising", "falling", "one"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_rounded_sums(ratio, scores, device):
    """Against float64: the order of sums may move a value over one rounding."""

    def rows(count: int, width: int, ratio: int) -> torch.Tensor:
        made = random_rows(count, width, ratio)
        steps = torch.arange(count, dtype=torch.float32)[:, None]
        if scores == "rising":
            made[:, width:] += 2.0 * steps
        elif scores == "falling":
            made[:, width:] -= 2.0 * steps
        elif scores == "one":
            made[:, width:] = -80.0 + 160.0 * (steps % ratio == 1)
        return made

    torch.manual_seed(ratio)
    batch = make(ratio, device, rows=rows, dtype=torch.float32)
    batch.rms_norm_weight.copy_(torch.rand(CHANNELS) + 0.5)
    want = batch.on_cpu()
    batch.run()
    reference.compress_norm_rope_insert(**want.arguments())
    (codes, rope, scales), (codes_64, rope_64, scales_64) = map(
        entry_parts, (batch, want)
    )
    assert torch.equal(scales, scales_64)
    off = (codes.int() - codes_64.int()).abs()
    assert int(off.max()) <= 1, "codes of neighbouring values"
    assert (off > 0).double().mean() < 2e-3
    rope_64 = rope_64.double()
    assert_within(rope, rope_64, 2.0**-7 * rope_64.abs() + 1e-6)
    assert (rope != rope_64).double().mean() < 1e-2


def test_tokens_that_write_nothing(device):
    """Negative slots, a slot beyond the cache, a negative position, a strange request,
    and rows of padding behind the slots."""
    torch.manual_seed(5)
    batch = make(4, device, spans=((0, 40),), padding=5)
    last = torch.arange(3, 40, 4)
    batch.slot_mapping[last[0]] = -1
    batch.kv_slot_mapping[last[1]] = -1
    batch.kv_slot_mapping[last[2]] = -(1 << 40)
    batch.kv_slot_mapping[last[3]] = len(batch.k_cache) * batch.k_cache.shape[1]
    batch.positions[last[4]] = -1
    batch.token_to_req_indices[last[5]] = -1
    batch.token_to_req_indices[last[6]] = 1
    assert_same_bytes(batch)
    assert int((entry_parts(batch)[2][:, 7] == 0).sum()) == 5 - 2


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_batch_without_entries_writes_nothing(ratio, device):
    batch = make(ratio, device, spans=((0, 3), (ratio, 2)))
    before = raw_bytes(batch.k_cache)
    batch.run()
    assert torch.equal(raw_bytes(batch.k_cache), before)


def test_no_tokens(device):
    batch = make(4, device)
    none = {
        name: x[:0]
        for name, x in batch.arguments().items()
        if name.endswith(("positions", "mapping", "indices"))
    }
    before = raw_bytes(batch.k_cache)
    replace(batch, **none).run()
    assert torch.equal(raw_bytes(batch.k_cache), before)


@pytest.mark.parametrize("ratio", RATIOS)
def test_tokens_without_a_block_are_left_out(ratio, device):
    """Blocks that are none, beyond the cache, or beyond the table; rows read in their
    place are NaN."""
    torch.manual_seed(6)
    at = 3 * ratio - 4
    batch = make(ratio, device, rows=random_rows, spans=((at, 4),) * 3, state_block=2)
    assert batch.state_cache[0].isnan().all()
    batch.block_table[0, at // 2] = -1
    batch.block_table[1, at // 2] = len(batch.state_cache)
    narrow = replace(batch, block_table=batch.block_table[:, : at // 2 + 1])
    for each in (batch, narrow):
        want = each.on_cpu()
        each.run()
        reference.compress_norm_rope_insert(**want.arguments())
        (codes, rope, scales), wanted = entry_parts(each), entry_parts(want)
        assert torch.equal(scales, wanted[2])
        assert int((codes.int() - wanted[0].int()).abs().max()) <= 1
        assert_within(rope, wanted[1].double(), 2.0**-7 * wanted[1].double().abs())


def test_no_block_at_all_gives_zeros(device):
    batch = make(4, device, spans=((3, 1),))
    batch.block_table[:] = -1
    batch = replace(batch, rms_norm_eps=EPS)
    batch.run()
    codes, rope, _ = entry_parts(batch)
    assert not (codes & 0x7F).any() and not rope.any()


def test_positions_outside_the_table_are_not_rotated(device):
    torch.manual_seed(7)
    batch = make(4, device, spans=((0, 20),))
    assert_same_bytes(replace(batch, cos_sin_cache=batch.cos_sin_cache[:9]))


@pytest.mark.parametrize("column", [77, CHANNELS + 5], ids=["value", "score"])
def test_nan_comes_out(column, device):
    batch = make(128, device, spans=((127, 1),))
    at = batch.block_table[0, 3]
    batch.state_cache[at, 2, column] = torch.nan
    batch.run()
    codes, rope, _ = entry_parts(batch)
    assert ((codes & 0x7F) == 0x7F).all() and rope.isnan().all()


def test_far_blocks_of_the_state_cache(device):
    """Elements past 2^31: a row's place is a 64-bit number."""
    if device.type != "cpu":
        pytest.skip("16 GiB, of which a CPU maps what is touched")
    torch.manual_seed(8)
    batch = make(4, device, spans=((3, 1),), state_block=4)
    blocks = (1 << 31) // (4 * 2048) + 2
    memory = sparse_memory(4 * blocks * 4 * 2048, device)
    far = memory.view(torch.float32).view(blocks, 4, 2048)
    far[-1] = batch.state_cache[batch.block_table[0, 0]]
    table = torch.full_like(batch.block_table, blocks - 1)
    near = replace(batch, k_cache=pages(2, 5, device))
    near.run()
    replace(batch, state_cache=far, block_table=table).run()
    assert torch.equal(raw_bytes(batch.k_cache), raw_bytes(near.k_cache))


def test_no_address_stored_twice(device):
    if device.type != "cpu":
        pytest.skip("counting stores needs the interpreter")
    batch = make(4, device, spans=((0, 11), (4, 4)))
    with counting_stores() as counts:
        batch.run()
    assert Counter(counts.values()) == {1: 3 * 584}


def test_states_are_read_once(device):
    """Of each token of a window, 512 values and scores; of no other token any."""
    if device.type != "cpu":
        pytest.skip("recording loads needs the interpreter")
    from loads import recording_loads

    batch = make(4, device, spans=((0, 11),))
    with recording_loads() as loads:
        batch.run()
    read = loads.within(batch.state_cache)
    # The tokens of the second entry's window, and those of the first, which has no
    # block before it: NaN of row 0 is read and left out there.
    rows = 8 + 8
    assert sum(read.values()) == rows * 2 * CHANNELS * 4


BAD = {
    "compress_ratio": (lambda b: 8, "compress_ratio, overlap = (8, True)"),
    "overlap": (lambda b: False, "compress_ratio, overlap = (4, False)"),
    "state_cache": (
        lambda b: b.state_cache.double(),
        "state_cache.dtype = torch.float64: expected torch.float32",
    ),
    "state_cache ": (
        lambda b: b.state_cache[..., :1024],
        "1024]: expected [*, *, 2048]",
    ),
    "state_cache  ": (
        lambda b: torch.zeros(2, 3, 2049)[..., :2048],
        "state_cache.stride() = (6147, 2049, 1): expected even",
    ),
    "state_cache   ": (
        lambda b: torch.zeros(2 * 3 * 2048 + 1)[1:].view(2, 3, 2048),
        "state_cache.data_ptr() = ",
    ),
    "state_cache    ": (lambda b: b.state_cache[:0], "expected at least one row"),
    "token_to_req_indices": (
        lambda b: b.token_to_req_indices[1:],
        "token_to_req_indices.shape[0] = 8: expected at least 9",
    ),
    "token_to_req_indices ": (
        lambda b: b.token_to_req_indices.float(),
        "token_to_req_indices.dtype = torch.float32",
    ),
    "positions": (
        lambda b: b.positions[1:],
        "slot_mapping.shape[0] = 9: expected at most 8",
    ),
    "slot_mapping": (
        lambda b: b.slot_mapping.to("meta"),
        "slot_mapping.device = meta: expected cpu",
    ),
    "block_table": (lambda b: b.block_table[0], "block_table.shape = "),
    "rms_norm_weight": (
        lambda b: b.rms_norm_weight.half(),
        "rms_norm_weight.dtype = torch.float16",
    ),
    "rms_norm_weight ": (lambda b: b.rms_norm_weight[1:], "expected [512]"),
    "rms_norm_eps": (lambda b: -1.0, "rms_norm_eps = -1.0"),
    "cos_sin_cache": (
        lambda b: b.cos_sin_cache[:, :32],
        "cos_sin_cache.shape = [400, 32]",
    ),
    "k_cache": (lambda b: b.k_cache.flatten(1), "k_cache.shape = "),
    "k_cache ": (lambda b: b.k_cache.view(torch.int8), "k_cache.dtype = torch.int8"),
    "kv_slot_mapping": (
        lambda b: b.kv_slot_mapping[1:],
        "kv_slot_mapping.shape[0] = 8: expected at least 9",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    batch = make(4, torch.device("cpu"), spans=((0, 9),))
    spoil, message = BAD[name]
    with pytest.raises(ValueError) as error:
        replace(batch, **{name.strip(): spoil(batch)}).run()
    assert message in str(error.value)
