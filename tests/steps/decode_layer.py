# SPDX-License-Identifier: Apache-2.0
"""A whole attention layer in decode: projections, norms, insert, compressor, attention.

The indexer of a ratio-4 layer may be left out; the layer then takes the entries that
the batch has chosen.
"""

from collections.abc import Sequence
from typing import Any

import layout
import reference_attention as reference
import torch
from attention_batch import Batch, random_sinks


class DecodeLayer:
    """Requests of one new token each, whose pages `attention_batch.Batch` fills.

    Their positions must not complete a compressed entry: the reference does not
    compress.
    """

    def __init__(self, ratio: int, seq_lens: Sequence[int]) -> None:
        assert all(not ratio or total % ratio for total in seq_lens)
        new = [1] * len(seq_lens)
        sinks = random_sinks()
        self.batch = Batch(ratio, seq_lens, new, sinks=sinks, attend=layout.attend)
        self.part = layout.projecting(self.batch.whole)
        self.sinks = sinks
        self.generator = torch.Generator().manual_seed(11)
        for name, parameter in self.batch.whole.named_parameters():
            if "sink" not in name:
                self._fill(parameter, around=1.0 if "norm" in name else 0.0)
            if "sink" not in name and "ape" not in name:
                parameter.data = parameter.data.to(torch.bfloat16)
        if self.part.compressor is not None:
            self._states(self.part.compressor.state_cache)
        self.hidden = torch.empty(len(seq_lens), self.part.hidden_size)
        self._fill(self.hidden, around=0.0, spread=1.0)
        self.hidden = self.hidden.to(torch.bfloat16).to(layout.device())
        self.positions = torch.tensor(self.batch.positions(), device=layout.device())
        shape = (len(seq_lens), self.part.padded_heads, reference.HEAD_DIM)
        self.out = torch.full(shape, torch.nan).to(self.hidden)

    def _fill(self, values: torch.Tensor, around: float, spread: float = 0.06) -> None:
        with torch.no_grad():
            noise = torch.randn(values.shape, generator=self.generator)
            values.copy_(around + spread * noise)

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

    def run(self) -> torch.Tensor:
        """What the layer gives its output projection, `[tokens, heads, 512]`."""
        self.part.attention_impl(self.hidden, self.positions, self.out)
        return self.out

    def expected(self) -> torch.Tensor:
        """The same in float64, over the pages as `run` left them; what the layer
        hands from one operator to the next is rounded to bf16."""
        part, eps = self.part, self.part.eps
        down = _bf16(self.hidden.double().cpu() @ _matrix(part.fused_wqa_wkv))
        latent, key = down.split([part.q_lora_rank, reference.HEAD_DIM], dim=-1)
        latent = _bf16(reference.normalize(latent, eps) * _weight(part.q_norm))
        key = _bf16(reference.normalize(key, eps) * _weight(part.kv_norm))
        queries = _bf16(latent @ _matrix(part.wq_b))
        queries = queries.unflatten(-1, (part.n_local_heads, reference.HEAD_DIM))
        table = part.rotary_emb.cos_sin_cache.cpu()[self.positions.cpu()]
        self.keys = reference.quantize(reference.rotate(key, table))
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


def _bf16(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.bfloat16).double()


def _weight(norm: torch.nn.Module) -> torch.Tensor:
    return norm.weight.detach().double().cpu()


def _matrix(linear: torch.nn.Module) -> torch.Tensor:
    return linear.weight.detach().double().cpu().T
