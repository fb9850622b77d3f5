# SPDX-License-Identifier: Apache-2.0
"""The stand-in of the compressor against its definition in float64."""

from dataclasses import dataclass

import pytest
import torch

from kernels.reference._quant import block_exponent, e4m3_bytes
from standins.emulated_xpu.ops.compressor import (
    fused_kv_compress_norm_rope_insert_sparse_attn,
)

HEAD, NOPE, ROPE = 512, 448, 64
STATE_BLOCK, PAGE_TOKENS, STRIDE, SCALES = 8, 5, 576, 8
PAGE_BYTES = PAGE_TOKENS * (STRIDE + SCALES) + 40
UNTOUCHED = 0xA5


@dataclass
class Batch:
    """Requests from their first token on, and one row each without a slot."""

    ratio: int
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        torch.manual_seed(self.ratio)
        self.overlap = int(self.ratio == 4)
        width = (1 + self.overlap) * HEAD
        blocks = -(-max(self.lengths) // STATE_BLOCK)
        count = len(self.lengths) * blocks
        order = torch.randperm(count) + 1
        self.table = order.view(len(self.lengths), blocks).int()
        self.state = torch.full((count + 1, STATE_BLOCK, 2 * width), torch.nan)
        self.owner = torch.repeat_interleave(
            torch.arange(len(self.lengths)), torch.tensor(self.lengths)
        )
        self.positions = torch.cat([torch.arange(n) for n in self.lengths])
        self.rows = torch.randn(len(self.positions), 2 * width)
        place = self.table[self.owner, self.positions // STATE_BLOCK].long()
        self.state[place, self.positions % STATE_BLOCK] = self.rows
        self.slots = torch.arange(len(self.positions)) * 3 % len(self.positions)
        angle = torch.rand(max(self.lengths), ROPE // 2) * 6.3
        self.turn = torch.cat((angle.cos(), angle.sin()), -1)
        self.weight = torch.rand(HEAD) + 0.5
        pages = len(self.positions) // PAGE_TOKENS + 1
        raw = torch.full((pages * PAGE_BYTES,), UNTOUCHED, dtype=torch.uint8)
        self.pages = raw.view(pages, PAGE_BYTES)
        self.cache = raw.as_strided(
            (pages, PAGE_TOKENS, STRIDE + SCALES), (PAGE_BYTES, STRIDE + SCALES, 1)
        )

    def run(self, state_slots: torch.Tensor, slots: torch.Tensor) -> None:
        fused_kv_compress_norm_rope_insert_sparse_attn(
            self.state,
            self.owner.int(),
            self.positions,
            state_slots,
            self.table,
            self.weight,
            1e-6,
            self.turn,
            self.cache,
            slots,
            PAGE_TOKENS,
            self.ratio,
            self.overlap,
            ROPE,
            STRIDE,
            SCALES,
            PAGE_BYTES,
        )

    def entry(self, token: int) -> torch.Tensor:
        """The normed and rotated entry that `token` ends, float64 `[512]`."""
        position = int(self.positions[token])
        window = (1 + self.overlap) * self.ratio
        first = max(position - window + 1, 0)
        rows = self.rows[token - position + first : token + 1].double()
        kv, score = rows.chunk(2, -1)
        if self.overlap:
            own = torch.arange(first, position + 1) > position - self.ratio
            kv = torch.where(own[:, None], kv[:, HEAD:], kv[:, :HEAD])
            score = torch.where(own[:, None], score[:, HEAD:], score[:, :HEAD])
        x = (kv * score.softmax(0)).sum(0)
        x = x * (x.square().mean() + 1e-6).rsqrt() * self.weight.double()
        cos, sin = self.turn[position + 1 - self.ratio].double().chunk(2)
        even, odd = x[NOPE::2], x[NOPE + 1 :: 2]
        pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
        return torch.cat((x[:NOPE], pairs.flatten()))

    def stored(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        page, row = self.pages[slot // PAGE_TOKENS], slot % PAGE_TOKENS
        scale = PAGE_TOKENS * STRIDE + row * SCALES
        data = page[row * STRIDE : (row + 1) * STRIDE]
        return data, page[scale : scale + SCALES]


@pytest.mark.parametrize(
    ("ratio", "lengths"), [(4, (9, 3, 17)), (128, (130, 127, 256))]
)
def test_each_block_s_end_writes_its_entry(
    ratio: int, lengths: tuple[int, ...]
) -> None:
    batch = Batch(ratio, lengths)
    batch.run(batch.slots, batch.slots)
    ends = [t for t, at in enumerate(batch.positions.tolist()) if (at + 1) % ratio == 0]
    assert len(ends) == sum(length // ratio for length in lengths)
    wrong, untouched = 0, batch.pages.clone()
    for token in ends:
        data, scales = batch.stored(slot := int(batch.slots[token]))
        entry = batch.entry(token)
        nope = entry[:NOPE].bfloat16().double()
        exponent = block_exponent(nope, 64, 448.0, 1e-4)
        assert torch.equal(scales[:7].long(), exponent) and not scales[7]
        wrong += int((data[:NOPE] != e4m3_bytes(nope, exponent)).sum())
        rope = data[NOPE:].clone().view(torch.bfloat16).double()
        torch.testing.assert_close(rope, entry[NOPE:], atol=1e-6, rtol=2**-7)
        page, row = untouched[slot // PAGE_TOKENS], slot % PAGE_TOKENS
        page[row * STRIDE : (row + 1) * STRIDE] = UNTOUCHED
        first = PAGE_TOKENS * STRIDE + row * SCALES
        page[first : first + SCALES] = UNTOUCHED
    assert wrong < 2e-3 * NOPE * len(ends)
    assert bool((untouched == UNTOUCHED).all())


def test_a_token_without_a_slot_writes_nothing() -> None:
    batch = Batch(4, (8, 5))
    none = torch.full_like(batch.slots, -1)
    batch.run(none, batch.slots)
    batch.run(batch.slots, none)
    assert bool((batch.pages == UNTOUCHED).all())


def test_positions_without_a_slot_are_refused() -> None:
    batch = Batch(4, (8,))
    with pytest.raises(IndexError, match="8 positions"):
        batch.run(batch.slots[:5], batch.slots)


def test_other_shapes_are_refused() -> None:
    batch = Batch(4, (8,))
    batch.overlap = 0
    with pytest.raises(ValueError, match="overlap 0"):
        batch.run(batch.slots, batch.slots)
