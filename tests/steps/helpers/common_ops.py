# SPDX-License-Identifier: Apache-2.0
"""Tests of the Triton ops that XPU shares with other platforms.

Each is compared with a reference: bytes and counts must be equal. A module of step
tests that imports these classes runs them too.
"""

from typing import Any

import pytest
import torch

from . import (
    compressor_run,
    e2m1_assembly,
    layout,
    model_configs,
    reference_attention,
)
from . import reference_ops as reference

BLOCK_SIZE = 64
HEAD, INDEX_HEAD, ROPE = 512, 128, 64
EPS = 1e-6
# One rounding to bf16.
HALF_ULP = 2.0**-8


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def table(positions: int) -> torch.Tensor:
    """A rotary table, `[positions, cos | sin]`, fp32."""
    angles = normal(positions, ROPE // 2, seed=5) * 3
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def ints(rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=layout.device())


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(layout.device()) for tensor in tensors]


def assert_rounded(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """`got` is `wanted` rounded to bf16, or its neighbour where fp32 decides it."""
    assert got.dtype == torch.bfloat16
    error = (got.cpu().double() - wanted).abs()
    assert (error <= 1.01 * HALF_ULP * wanted.abs() + 1e-30).all(), float(error.max())


def assert_few_differ(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Codes are equal but for the few whose rounding fp32 decides."""
    differ = got.cpu().view(torch.uint8) != wanted.view(torch.uint8)
    assert differ.double().mean() < 5e-3, f"{int(differ.sum())} of {differ.numel()}"


def indexer_query(mxfp4: bool) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Quantize an indexer's query by Triton: (codes, or codes and scales), weights,
    and the rotated query in bf16."""
    q = (normal(3, 4, INDEX_HEAD) * 3).to(torch.bfloat16)
    weights = normal(3, 4, seed=1).to(torch.bfloat16)
    positions = torch.tensor([0, 6, 3])
    with layout.triton_indexer_query() as op, e2m1_assembly.interpreted():
        quantized, folded = op(
            *on_device(positions, q, table(8), weights), 0.5, 0.25, use_fp4=mxfp4
        )
    rotated = reference.rotate(q, table(8)[positions][:, None]).to(torch.bfloat16)
    return quantized, folded.cpu().double() / (weights.double() / 8), rotated


class Compressed:
    """What a compressor wrote for random tokens, and what it should have written."""

    def __init__(self, kind: str) -> None:
        config = model_configs.vllm_config()
        if kind.startswith("indexer"):
            mxfp4 = kind.endswith("MXFP4")
            compressor = compressor_run.build(config, head_dim=128, mxfp4=mxfp4)
        else:
            compressor = compressor_run.build(config, ratio=int(kind.split()[-1]))
        self.ratio, self.head = compressor.compress_ratio, compressor.head_dim
        lengths = (12, 7) if self.ratio == 4 else (128,)
        width = compressor.coff * self.head
        self.kv, self.score = normal(sum(lengths), 2 * width).split(width, dim=1)
        ape = normal(self.ratio, width, seed=3)
        self.weight = 1 + normal(self.head, seed=4) / 4
        compressor.ape.data = ape.to(layout.device())
        compressor.norm.weight.data = self.weight.to(layout.device())
        rows = torch.cat((self.kv, self.score), dim=1)
        with e2m1_assembly.interpreted():
            self.written = compressor_run.run(
                config, compressor, rows, table(128), lengths
            )
        self.state, self.entries, self.at, self.slots = [], [], [], []
        for request, length in enumerate(lengths):
            start = sum(lengths[:request])
            each = torch.arange(length)
            kv = self.kv[start : start + length]
            score = self.score[start : start + length] + ape[each % self.ratio]
            self.state.append(torch.cat((kv, score), dim=1))
            for end in range(self.ratio - 1, length, self.ratio):
                arguments = (self.weight, EPS, self.ratio, end)
                self.entries.append(reference.entry(kv, score, *arguments))
                self.at.append(end // self.ratio * self.ratio)
                first = request * compressor_run.PAGE_TOKENS // len(lengths)
                self.slots.append(first + end // self.ratio)

    def rotated(self) -> torch.Tensor:
        return reference.rotate(torch.stack(self.entries), table(128)[self.at])


@pytest.mark.unchanged
@pytest.mark.any_platform
class TestSharedOps:
    """Ops that every release has."""

    def test_quantize_and_insert_k_cache(self) -> None:
        k = (normal(6, HEAD) * torch.logspace(-6, 4, 6)[:, None]).to(torch.bfloat16)
        k[3, :64] = 0
        slots = torch.tensor([130, -1, 5, 63, 64, 0])
        pages = torch.full((3, 40_000), 7, dtype=torch.uint8)
        (cache,) = on_device(pages.clone())
        op = layout.common_op("quantize_and_insert_k_cache")
        op(*on_device(k), cache, *on_device(slots), BLOCK_SIZE)
        for row, slot in zip(k, slots.tolist(), strict=True):
            if slot < 0:
                continue
            page, at = pages[slot // BLOCK_SIZE], slot % BLOCK_SIZE
            data, scales = reference.page_row(row)
            page[at * 576 : (at + 1) * 576] = data
            page[BLOCK_SIZE * 576 + at * 8 :][:8] = scales
        assert torch.equal(cache.cpu(), pages)

    @pytest.mark.parametrize("gather_lens", [None, [5, 3]], ids=["all", "last"])
    def test_dequantize_and_gather_k_cache(self, gather_lens: list[int] | None) -> None:
        generator = torch.Generator().manual_seed(1)
        page_bytes = 16 * 584 + 100
        pages = reference_attention.random_pages(5, 16, page_bytes, generator)
        seq_lens, block_table = [18, 3], torch.tensor([[4, 2], [1, 0]])
        out = torch.full((2, 25, HEAD), torch.nan, dtype=torch.bfloat16)
        (got,) = on_device(out.clone())
        layout.common_op("dequantize_and_gather_k_cache")(
            got,
            *on_device(pages),
            seq_lens=ints(seq_lens),
            gather_lens=gather_lens and ints(gather_lens),
            block_table=ints(block_table.tolist()),
            block_size=16,
            offset=4,
        )
        for request, total in enumerate(seq_lens):
            count = gather_lens[request] if gather_lens else total
            for row, position in enumerate(range(total - count, total)):
                block = int(block_table[request, position // 16])
                values = reference_attention.read(pages, block, position % 16)
                out[request, 4 + row] = values.to(torch.bfloat16)
        assert torch.equal(got.cpu().view(torch.int16), out.view(torch.int16))

    def test_compute_global_topk_indices_and_lens(self) -> None:
        local = [[0, 17, -1, 5, 31], [-1] * 5, [9, 8, 7, 6, 5], [16, -1, 0, 1, -1]]
        requests, valid = [0, 1, 1, 0], [True, True, False, True]
        block_table = torch.tensor([[3, 9], [0, 4]])
        slots, lens = layout.common_op("compute_global_topk_indices_and_lens")(
            ints(local),
            ints(requests),
            ints(block_table.tolist()),
            16,
            torch.tensor(valid, device=layout.device()),
        )
        wanted, counts = reference.global_slots(local, requests, block_table, 16, valid)
        assert lens.tolist() == counts
        # Nobody reads the slots of padding.
        assert slots[valid].tolist() == [wanted[0], wanted[1], wanted[3]]

    @pytest.mark.parametrize(
        ("ratio", "topk"), [(4, 6), (1, 0)], ids=["ratio 4", "window"]
    )
    def test_combine_topk_swa_indices(self, ratio: int, topk: int) -> None:
        window, rows, first = 8, 40, 12
        seq_lens, query_lens, gather_lens = [30, 5], [4, 5], [11, 5]
        chosen = torch.randint(0, 7, (9, 6), generator=torch.Generator().manual_seed(2))
        starts = [100, 104, 109]
        indices, lens = layout.common_op("combine_topk_swa_indices")(
            ints(chosen.tolist()),
            ints(starts),
            ints(seq_lens),
            ints(gather_lens),
            window,
            ratio,
            topk,
            rows,
            first,
        )
        token = 0
        for request, (total, new) in enumerate(zip(seq_lens, query_lens, strict=True)):
            for position in range(total - new, total):
                count = min((position + 1) // ratio, topk)
                wanted = [request * rows + int(at) for at in chosen[token, :count]]
                start = request * rows + first - (total - gather_lens[request])
                wanted += [start + at for at in reference.window(position, window)]
                got = indices[token].tolist()
                assert int(lens[token]) == len(wanted)
                assert got[: len(wanted)] == wanted
                assert set(got[len(wanted) :]) <= {-1}
                token += 1

    def test_fused_q_kv_rmsnorm(self) -> None:
        both = normal(3, 300).to(torch.bfloat16)
        q, kv = both[:, :200], both[:, 200:]
        weights = [(1 + normal(n, seed=n)).to(torch.bfloat16) for n in (200, 100)]
        got = layout.common_op("fused_q_kv_rmsnorm")(*on_device(q, kv, *weights), EPS)
        for value, x, weight in zip(got, (q, kv), weights, strict=True):
            assert_rounded(value, reference.rms_norm(x, weight, EPS))

    def test_fused_indexer_q_rope_quant(self) -> None:
        codes, factor, rotated = indexer_query(mxfp4=False)
        power = reference.exponent(rotated, reference.E4M3, 1e-4)
        assert torch.allclose(factor, power.double().exp2(), rtol=1e-6)
        assert_few_differ(codes, reference.e4m3(rotated, power))

    def test_fused_indexer_q_rope_quant_in_mxfp4(self) -> None:
        (codes, scales), factor, rotated = indexer_query(mxfp4=True)
        blocks = rotated.unflatten(-1, (-1, 32))
        power = reference.exponent(blocks, reference.E2M1, 6 * 2.0**-126)
        assert torch.allclose(factor, torch.ones(()).double(), rtol=1e-6)
        scales = scales.cpu().contiguous().view(torch.uint8).view(power.shape)
        assert torch.equal(scales, (power + 127).to(torch.uint8))
        codes = codes.cpu().contiguous().view(torch.uint8)
        assert_few_differ(codes, reference.e2m1(blocks, power).flatten(-2))

    @pytest.mark.parametrize("packed", [False, True], ids=["fp32", "packed"])
    def test_fused_inv_rope_fp8_quant(self, packed: bool) -> None:
        o, positions = (
            normal(5, 4, HEAD).to(torch.bfloat16),
            torch.tensor([7, 0, 3, 3, 1]),
        )
        codes, scales = layout.common_op("fused_inv_rope_fp8_quant")(
            *on_device(o, positions, table(8)), 2, 2, tma_aligned_scales=packed
        )
        rows = reference.rotate(o, table(8)[positions][:, None], sign=-1)
        blocks = rows.view(5, 2, 2 * HEAD // 128, 128)
        power = reference.exponent(blocks, reference.E4M3, 1e-10)
        if packed:
            wanted = (power + 127).to(torch.uint8).view(torch.int32)
            assert torch.equal(scales.cpu(), wanted.view(5, 2, -1))
        else:
            assert torch.equal(scales.cpu().double(), power.double().exp2())
        assert_few_differ(codes, reference.e4m3(blocks, power).flatten(-2))


@pytest.mark.unchanged
@pytest.mark.any_platform
class TestCompressor:
    """What a compressor writes: the attention's entries and the indexer's keys."""

    @pytest.mark.parametrize("ratio", [4, 128])
    def test_fused_compress_quant_cache(self, ratio: int) -> None:
        made = Compressed(f"ratio {ratio}")
        assert torch.equal(
            made.written.state, torch.cat(made.state)
        )  # save_partial_states
        nope = torch.stack(made.entries)[:, :448].to(torch.bfloat16).view(-1, 7, 64)
        power = reference.exponent(nope, reference.E4M3, 1e-4)
        rows = made.written.data[made.slots]
        scales = made.written.scales[made.slots]
        assert torch.equal(scales[:, :7], (power + 127).to(torch.uint8))
        assert not scales[:, 7].any()
        assert_few_differ(rows[:, :448], reference.e4m3(nope, power).flatten(1))
        assert_rounded(
            rows[:, 448:].contiguous().view(torch.bfloat16), made.rotated()[:, 448:]
        )
        others = [
            slot for slot in range(len(made.written.data)) if slot not in made.slots
        ]
        assert not made.written.data[others].any(), "writes where no entry ends"

    def test_fused_compress_quant_cache_of_the_indexer(self) -> None:
        made = Compressed("indexer FP8")
        rotated = made.rotated().to(torch.bfloat16)
        power = reference.exponent(rotated, reference.E4M3, 1e-4)
        scales = made.written.scales[made.slots].view(torch.float32)[:, 0]
        assert torch.equal(scales.double(), power.double().exp2())
        wanted = reference.e4m3(rotated, power)
        assert_few_differ(made.written.data[made.slots], wanted)

    def test_fused_compress_quant_cache_of_the_indexer_in_mxfp4(self) -> None:
        made = Compressed("indexer MXFP4")
        blocks = made.rotated().to(torch.bfloat16).unflatten(-1, (-1, 32))
        power = reference.exponent(blocks, reference.E2M1, 6 * 2.0**-126)
        scales = made.written.scales[made.slots]
        assert torch.equal(scales, (power + 127).to(torch.uint8))
        wanted = reference.e2m1(blocks, power).flatten(-2)
        assert_few_differ(made.written.data[made.slots], wanted)


@pytest.mark.unchanged
@pytest.mark.any_platform
class TestDraft:
    """Ops of the draft model, in the releases that have them."""

    __test__ = layout.common_op("fused_mtp_input_rmsnorm") is not None

    def test_fused_mtp_input_rmsnorm(self) -> None:
        embeds = normal(3, 96).to(torch.bfloat16)
        previous = normal(3, 4, 96, seed=1).to(torch.bfloat16)
        weights = [(1 + normal(96, seed=n)).to(torch.bfloat16) for n in (2, 3)]
        positions = torch.tensor([5, 0, 1])
        got, streams = layout.common_op("fused_mtp_input_rmsnorm")(
            *on_device(embeds, positions, previous, *weights), EPS, 4
        )
        wanted = reference.rms_norm(embeds, weights[0], EPS)
        wanted[1] = 0
        assert_rounded(got, wanted)
        assert_rounded(streams, reference.rms_norm(previous, weights[1], EPS))

    def test_mtp_shared_head_rmsnorm(self) -> None:
        x, weight = normal(3, 96).to(torch.bfloat16), normal(96).to(torch.bfloat16)
        op = layout.common_op("mtp_shared_head_rmsnorm")
        got = op(*on_device(x, weight), EPS)
        assert_rounded(got, reference.rms_norm(x, weight, EPS))


@pytest.mark.unchanged
@pytest.mark.any_platform
class TestMixedIndices:
    """Two decoding and two prefilling requests, in the releases that have the op."""

    __test__ = layout.common_op("build_flashinfer_mixed_sparse_indices") is not None
    WINDOW, TOPK, RATIO, SWA_BLOCK, BLOCK = 8, 6, 4, 4, 2

    @pytest.mark.parametrize("local", [False, True], ids=["global", "local"])
    def test_build_flashinfer_mixed_sparse_indices(self, local: bool) -> None:
        seq_lens, starts = [9, 3, 14, 2], [0, 1, 2, 5, 7]
        owner = [0, 1, 2, 2, 2, 3, 3]
        generator = torch.Generator().manual_seed(3)
        swa_table = torch.randperm(16, generator=generator).view(4, 4)
        table = torch.randperm(16, generator=generator).view(4, 4)
        decode_swa = torch.randint(-1, 60, (2, self.WINDOW), generator=generator)
        decode = torch.tensor([[1, 0, -1, 2, 3, -1, 5], [0, -1, -1, -1, -1, -1, -1]])
        decode_lens, valid = [3, 1], [True, False]
        prefill = torch.tensor([[2, 0, 1, -1, 3, 4]] * 5)
        indices, lens = layout.common_op("build_flashinfer_mixed_sparse_indices")(
            ints(decode_swa.tolist()),
            ints(decode.tolist()),
            None if local else ints(decode_lens),
            ints(prefill.tolist()),
            ints(starts),
            ints(seq_lens),
            ints(owner),
            ints(swa_table.tolist()),
            self.SWA_BLOCK,
            ints(table.tolist()),
            self.BLOCK,
            self.WINDOW,
            self.RATIO,
            self.TOPK,
            decode_compressed_indices_are_local=local,
            decode_is_valid_token=torch.tensor(valid, device=layout.device()),
        )
        assert indices.shape == (7, self.WINDOW + 8)
        rows, wanted_lens = decode.tolist(), decode_lens
        if local:
            arguments = (decode.tolist(), owner[:2], table, self.BLOCK, valid)
            rows, wanted_lens = reference.global_slots(*arguments)
        wanted = [
            [*decode_swa[token].tolist(), *row, -1] for token, row in enumerate(rows)
        ]
        assert indices[:2].tolist() == wanted
        assert lens[:2].tolist() == [self.WINDOW + count for count in wanted_lens]
        for token in range(2, 7):
            request = owner[token]
            start = seq_lens[request] - (starts[request + 1] - starts[request])
            position = start + token - starts[request]
            swa = [
                reference.slot(swa_table[request], at, self.SWA_BLOCK)
                for at in reference.window(position, self.WINDOW)
            ]
            count = min((position + 1) // self.RATIO, self.TOPK)
            chosen = prefill[token - 2].tolist()[:count]
            arguments = ([chosen], [request], table, self.BLOCK, [True])
            ((slots,), _) = reference.global_slots(*arguments)
            row = swa + [-1] * (self.WINDOW - len(swa)) + slots
            assert indices[token].tolist() == row + [-1] * (8 - count)
            assert int(lens[token]) == self.WINDOW + count
