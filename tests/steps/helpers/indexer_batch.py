# SPDX-License-Identifier: Apache-2.0
"""A batch for the real sparse indexer, and the keys that it must choose."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from . import batch_metadata, layout, model_configs, model_layers

RATIO = 4
DIM, ROPE_DIM = 128, 64
TOPK = 16
MXFP4_BLOCK = 32
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


class Given(torch.nn.Module):
    """A projection that returns a given result."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x, None


class Nothing(torch.nn.Module):
    """A compressor whose keys are in the cache already."""

    def forward(self, *args: Any) -> None:
        return None


def least_exponent(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The least k with amax <= largest * 2^k, by comparison."""
    k = torch.arange(-60, 61)
    return torch.searchsorted(largest * torch.exp2(k.double()), amax) + k[0]


def e2m1_codes(x: torch.Tensor) -> torch.Tensor:
    """Nibbles of the nearest e2m1 values of float64 `x`, ties to the even code."""
    distance = (x.abs().clamp(max=6.0)[..., None] - E2M1).abs()
    nearest = (distance + torch.arange(8) % 2 * 2.0**-40).argmin(-1)
    return nearest + 8 * torch.signbit(x)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    return torch.cat((E2M1, -E2M1))[codes.long()]


def mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes `[..., D]` and exponents `[..., D / 32]` of float64 `x`."""
    blocks = x.unflatten(-1, (-1, MXFP4_BLOCK))
    exponents = least_exponent(blocks.abs().amax(-1), 6.0)
    scaled = blocks * torch.exp2(-exponents[..., None].double())
    return e2m1_codes(scaled).flatten(-2), exponents


def quantized(x: torch.Tensor, fp4: bool) -> torch.Tensor:
    """Float64 `x`, `[..., 128]`, after MXFP4, or after FP8 with one scale per row."""
    if fp4:
        codes, exponents = mxfp4(x)
        scale = torch.exp2(exponents.double()).repeat_interleave(MXFP4_BLOCK, -1)
        return e2m1_values(codes) * scale
    scale = torch.exp2(least_exponent(x.abs().amax(-1), 448.0).double())[..., None]
    return (x / scale).float().to(torch.float8_e4m3fn).double() * scale


def quarter_turns(positions: int) -> torch.Tensor:
    """Cosines and sines from -1, 0 and 1: turns that no rounding can tell apart."""
    quarter = torch.randint(0, 4, (positions, ROPE_DIM // 2))
    cos = torch.tensor([1.0, 0.0, -1.0, 0.0])[quarter]
    sin = torch.tensor([0.0, 1.0, 0.0, -1.0])[quarter]
    return torch.cat((cos, sin), -1)


def turned(q: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The last 64 values of `q`, `[T, H, 128]`, rotated in pairs."""
    cos, sin = table.double()[:, None].chunk(2, -1)
    even, odd = q[..., -ROPE_DIM::2].double(), q[..., 1 - ROPE_DIM :: 2].double()
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return torch.cat((q[..., :-ROPE_DIM].double(), pairs.flatten(-2)), -1)


def fp8_keys(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stored values, stored scales and float64 meaning of `count` random keys."""
    values = torch.randn(count, DIM).to(torch.float8_e4m3fn)
    scales = torch.rand(count, 1) + 0.5
    meaning = values.double() * scales.double()
    return values.view(torch.uint8), scales.view(torch.uint8), meaning


def mxfp4_keys(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `fp8_keys`: two codes per byte, one UE8M0 byte per 32 values."""
    codes = torch.randint(0, 16, (count, DIM), dtype=torch.uint8)
    scales = torch.randint(124, 130, (count, DIM // MXFP4_BLOCK), dtype=torch.uint8)
    power = torch.exp2(scales.double() - 127).repeat_interleave(MXFP4_BLOCK, -1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales, e2m1_values(codes) * power


class Batch:
    """Requests whose keys lie in pages, and the metadata of vLLM's own builder.

    Args:
        seq_lens: tokens of each request, the new ones included; decodes first.
        query_lens: new tokens of each request.
        fp4: MXFP4 keys and queries instead of FP8.
        first_page: the pages before it exist and are not touched.
        speculative_tokens: draft tokens that still count as a decode.
        build: makes the layer from a `VllmConfig` and the ratio.
    """

    def __init__(
        self,
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        *,
        fp4: bool = False,
        first_page: int = 0,
        speculative_tokens: int = 0,
        build: Callable[[Any, int], Any] = model_layers.attention_layer,
    ) -> None:
        torch.manual_seed(len(seq_lens))
        self.seq_lens, self.query_lens, self.fp4 = seq_lens, query_lens, fp4
        config = model_configs.vllm_config(speculative_tokens=speculative_tokens)
        config.model_config.hf_config.index_topk = TOPK
        if fp4:
            model_configs.take_mxfp4_indexer(config)
        self.config = config
        self.layer = build(config, RATIO)
        self.indexer = self.layer.indexer
        self.builder = batch_metadata.indexer_builder(config, self.indexer)
        self.positions = torch.tensor(
            [
                position
                for total, new in zip(seq_lens, query_lens, strict=True)
                for position in range(total - new, total)
            ]
        )
        self.table = batch_metadata.common_metadata(
            seq_lens, query_lens
        ).block_table_tensor
        self.table = self.table + first_page
        self._fill_cache()
        tokens, heads = len(self.positions), self.indexer.n_head
        # An odd last bit is no midpoint of e4m3 or e2m1, which the op of later releases
        # does not round to the even code.
        q = torch.randn(tokens, heads, DIM).bfloat16().view(torch.int16)
        self.q = (q | 1).view(torch.bfloat16)
        self.weights = torch.randn(tokens, heads).bfloat16()
        self.rotation = quarter_turns(int(self.positions.max()) + 1)
        buffer = torch.full((tokens, TOPK), 99, dtype=torch.int32)
        self.chosen = buffer.to(layout.device())
        self.indexer.topk_indices_buffer = self.chosen
        self.indexer.indexer_op.topk_indices_buffer = self.chosen

    def _fill_cache(self) -> None:
        spec = self.indexer.k_cache.get_kv_cache_spec(self.config)
        size, stride = layout.BLOCK_SIZE // RATIO, spec.page_size_bytes
        width = self.indexer.k_cache.head_dim
        pages = int(self.table.max()) + 1
        raw = torch.empty(pages * stride, dtype=torch.uint8, device=layout.device())
        shape, strides = (pages, size, width), (stride, width, 1)
        self.indexer.k_cache.kv_cache = raw.as_strided(shape, strides)
        self.keys = []
        for request, total in enumerate(self.seq_lens):
            count = -(-max(total // RATIO, 1) // size) * size
            values, scales, meaning = (mxfp4_keys if self.fp4 else fp8_keys)(count)
            self.keys.append(meaning[: total // RATIO])
            for place in range(count // size):
                rows = slice(place * size, (place + 1) * size)
                stored = torch.cat((values[rows].flatten(), scales[rows].flatten()))
                start = int(self.table[request, place]) * stride
                raw[start : start + len(stored)] = stored.to(raw.device)

    def _metadata(self) -> Any:
        common = batch_metadata.common_metadata(self.seq_lens, self.query_lens)
        common.block_table_tensor = self.table.to(layout.device())
        with model_configs.current(self.config):
            return self.builder.build(0, common)

    def run(self, watch: AbstractContextManager[Any] | None = None) -> torch.Tensor:
        """What the indexer writes into its buffer, `[tokens, TOPK]`; under `watch`."""
        from vllm.forward_context import set_forward_context

        indexer, device = self.indexer, layout.device()
        indexer.wq_b, indexer.compressor = Given(), Nothing()
        metadata = {indexer.k_cache.prefix: self._metadata()}
        rotary = SimpleNamespace(cos_sin_cache=self.rotation.to(device))
        tokens = len(self.positions)
        hidden = torch.zeros(tokens, 1, dtype=torch.bfloat16, device=device)
        q, weights = self.q.flatten(1).to(device), self.weights.to(device)
        positions = self.positions.to(device)
        layout.workspace()
        watching = watch or nullcontext()
        with (
            model_configs.current(self.config),
            set_forward_context(metadata, self.config),
            watching,
        ):
            made = indexer(hidden, q, None, weights, positions, rotary)
            if isinstance(made, tuple):  # the caller runs the second half
                q, scales, weights = made
                q_quant = q if scales is None else (q, scales)
                indexer.indexer_op(hidden, q_quant, None, weights)
        return self.chosen.cpu()

    def scores(self) -> list[torch.Tensor]:
        """Of each token: its score, float64, of each key that it may see."""
        q = quantized(turned(self.q, self.rotation[self.positions]), self.fp4)
        weights = self.weights.double() * DIM**-0.5 * self.indexer.n_head**-0.5
        owners = torch.repeat_interleave(
            torch.arange(len(self.seq_lens)), torch.tensor(self.query_lens)
        )
        return [
            torch.einsum(
                "h,hk->k",
                weights[token],
                (q[token] @ self.keys[owner][: (position + 1) // RATIO].T).relu(),
            )
            for token, (owner, position) in enumerate(
                zip(owners.tolist(), self.positions.tolist(), strict=True)
            )
        ]

    def check(self) -> None:
        """Each token's choice is the best keys that it may see, each once."""
        for token, (row, scores) in enumerate(
            zip(self.run(), self.scores(), strict=True)
        ):
            chosen = row[row >= 0].long()
            count = min(TOPK, len(scores))
            assert len(set(chosen.tolist())) == len(chosen) == count, (
                f"token {token} chose {row.tolist()} of {len(scores)} keys"
            )
            if count == len(scores):
                continue
            assert int(chosen.max()) < len(scores), f"token {token} looks ahead"
            left = torch.ones(len(scores), dtype=torch.bool)
            left[chosen] = False
            worse = float(scores[left].max() - scores[chosen].min())
            assert worse <= 1e-5 * float(scores.abs().max()), (
                f"token {token} left out a key better by {worse:.3g}"
            )
