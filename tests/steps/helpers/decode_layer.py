# SPDX-License-Identifier: Apache-2.0
"""A whole attention layer in decode: projections, norms, insert, compressor, attention.

The indexer of a ratio-4 layer may be left out; the layer then takes the entries that
the batch has chosen.
"""

from collections.abc import Sequence
from typing import Any

import torch

from . import batch_metadata, layer_parts, layout, model_configs
from . import reference_attention as reference
from .attention_batch import Batch, random_sinks
from .indexer_batch import fp8_keys


class DecodeLayer:
    """Requests of one new token each, whose pages `attention_batch.Batch` fills.

    Their positions must not complete a compressed entry: the reference does not
    compress.
    """

    def __init__(self, ratio: int, seq_lens: Sequence[int], **kind: Any) -> None:
        assert all(not ratio or total % ratio for total in seq_lens)
        new = [1] * len(seq_lens)
        sinks = random_sinks()
        self.batch = Batch(
            ratio, seq_lens, new, sinks=sinks, attend=layer_parts.attend, **kind
        )
        self.part = layer_parts.projecting(self.batch.whole)
        self.sinks = sinks
        self.generator = torch.Generator().manual_seed(11)
        fill(self.batch.whole, self.generator)
        if self.part.compressor is not None:
            self._states(self.part.compressor.state_cache)
        shape = (len(seq_lens), self.part.hidden_size)
        hidden = torch.randn(shape, generator=self.generator)
        self.hidden = hidden.to(torch.bfloat16).to(layout.device())
        self.positions = torch.tensor(self.batch.positions(), device=layout.device())
        size = (len(seq_lens), self.part.padded_heads, reference.HEAD_DIM)
        self.out = torch.full(size, torch.nan).to(self.hidden)

    def _states(self, cache: Any) -> None:
        spec = cache.get_kv_cache_spec(self.batch.config)
        blocks = int(self.batch._common(spec).block_table_tensor.max()) + 1
        shape = (blocks, spec.block_size, cache.state_dim)
        cache.kv_cache = torch.zeros(shape, device=layout.device())
        builder = cache.get_attn_backend().get_builder_cls()
        made = self.batch._build(builder, spec, cache.prefix)
        self.batch.metadata[cache.prefix] = made

    def leave_out_indexer(self) -> None:
        """Let the layer take the entries that the batch chose."""
        if self.part.indexer is not None:
            self.part.indexer.forward = lambda *args, **kwargs: None

    def take_indexer(self) -> None:
        """Give the indexer its metadata and random keys, so that it chooses."""
        indexer, batch = self.part.indexer, self.batch
        self._states(indexer.compressor.state_cache)
        spec = indexer.k_cache.get_kv_cache_spec(batch.config)
        entries = spec.block_size // batch.ratio
        common = batch._common(spec)
        pages = int(common.block_table_tensor.max()) + 1
        raw = torch.zeros(pages, spec.page_size_bytes, dtype=torch.uint8)
        for page in raw:
            values, scales, _ = fp8_keys(entries)
            stored = torch.cat((values.flatten(), scales.flatten()))
            page[: len(stored)] = stored
        width = indexer.k_cache.head_dim
        shape, strides = (pages, entries, width), (raw.stride(0), width, 1)
        indexer.k_cache.kv_cache = raw.to(layout.device()).as_strided(shape, strides)
        builder = batch_metadata.indexer_builder(batch.config, indexer)
        with model_configs.current(batch.config):
            batch.metadata[indexer.k_cache.prefix] = builder.build(0, common)

    def run(self) -> torch.Tensor:
        """The layer's input to its output projection, `[tokens, heads, 512]`."""
        with layout.worker():
            if not layout.WITH_XPU_FOLDER:
                self.part.attention_impl(self.hidden, self.positions, self.out)
            else:
                self.part._o_proj = lambda heads, positions: self.out.copy_(heads)
                self.part(self.positions, self.hidden)
        return self.out

    def expected(self) -> torch.Tensor:
        """The same in float64, over the pages as `run` left them; what the layer
        hands from one operator to the next is rounded to bf16."""
        part, eps = self.part, self.part.eps
        down = bf16(self.hidden.double().cpu() @ matrix(part.fused_wqa_wkv))
        latent, key = down.split([part.q_lora_rank, reference.HEAD_DIM], dim=-1)
        latent = bf16(reference.normalize(latent, eps) * weight(part.q_norm))
        key = bf16(reference.normalize(key, eps) * weight(part.kv_norm))
        queries = bf16(latent @ matrix(part.wq_b))
        queries = queries.unflatten(-1, (part.n_local_heads, reference.HEAD_DIM))
        table = part.rotary_emb.cos_sin_cache.cpu()[self.positions.cpu()]
        self.keys = reference.quantize(reference.rotate(key, table))
        if self.part.indexer is not None:
            self.batch.chosen = self.batch.layer.topk_indices_buffer
        normal = reference.normalize(queries, eps)
        self.batch.queries = reference.rotate(normal, table[:, None])
        return self.batch.expected(self.sinks)

    def inserted(self) -> torch.Tensor:
        """The keys of the new tokens, read from their pages, `[tokens, 512]`."""
        batch = self.batch
        positions = batch.positions()
        rows = [
            reference.gather(batch.window_pages, batch.window_table[row], [position])
            for row, position in enumerate(positions)
        ]
        return torch.cat(rows)


def fill(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Random weights; bf16 but for sinks, which stay, positions and hyper-connections.
    Norms lie around 1."""
    for name, parameter in module.named_parameters():
        if "sink" in name:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        values = 0.06 * noise + (1.0 if "norm" in name else 0.0)
        kept = "ape" in name or "hc_" in name
        parameter.data = values.to(parameter.dtype if kept else torch.bfloat16)


def bf16(values: torch.Tensor) -> torch.Tensor:
    """`values` after one rounding, in float64."""
    return values.to(torch.bfloat16).double()


def weight(norm: torch.nn.Module) -> torch.Tensor:
    """The weight of a norm, float64 on the host."""
    return norm.weight.detach().double().cpu()


def matrix(linear: torch.nn.Module) -> torch.Tensor:
    """The matrix that a linear layer multiplies rows by, `[in, out]` float64 on the
    host."""
    return linear.weight.detach().double().cpu().T
