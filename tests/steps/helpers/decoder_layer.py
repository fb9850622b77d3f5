# SPDX-License-Identifier: Apache-2.0
"""A whole decoder layer in decode, and the draft model's layer around one: norms,
hyper-connections, attention and its output projection. The routed experts have tests
of their own."""

from collections.abc import Sequence
from typing import Any

import torch

from . import decode_layer, layout, model_layers
from . import reference_attention as reference
from . import reference_hyper_connections as hyper
from .decode_layer import bf16, matrix, weight


class Halving(torch.nn.Module):
    """In place of the routed experts."""

    def __init__(self, vllm_config: Any, prefix: str) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor, input_ids: Any = None) -> torch.Tensor:
        return x * 0.5


class Decoder:
    """A decoder layer with random weights, and one token of each request."""

    def __init__(self, ratio: int, seq_lens: Sequence[int], **kind: Any) -> None:
        self.attention = decode_layer.DecodeLayer(
            ratio, seq_lens, build=self._build, **kind
        )
        generator = torch.Generator().manual_seed(5)
        sinks = self.block.attn.attn_sink.detach().clone()
        decode_layer.fill(self.filled(), generator)
        self.block.attn.attn_sink.data.copy_(sinks)
        shape = (len(seq_lens), self.block.hc_mult, self.block.hidden_size)
        streams = torch.randn(shape, generator=generator)
        self.streams = streams.to(torch.bfloat16).to(layout.device())

    def _build(self, config: Any, ratio: int) -> Any:
        self.block = model_layers.decoder_layer(config, ratio, Halving)
        return self.block.attn

    def filled(self) -> torch.nn.Module:
        """The module whose weights are random."""
        return self.block

    def run(self) -> torch.Tensor:
        """The streams after the layer, `[tokens, streams, hidden]`."""
        positions = self.attention.positions
        x, *rest = self.block(self.streams, positions, None, None, None, None)
        return self.block.hc_post(x, *rest)

    def expected(self) -> torch.Tensor:
        """The same in float64, with intermediate results rounded to bf16."""
        return self.after_block(self.streams.cpu().double())

    def after_block(self, streams: torch.Tensor) -> torch.Tensor:
        block = self.block
        for name, norm, sublayer in (
            ("attn", block.attn_norm, self._attended),
            ("ffn", block.ffn_norm, lambda x: x * 0.5),
        ):
            parameters = [
                getattr(block, f"hc_{name}_{part}").detach().cpu()
                for part in ("fn", "scale", "base")
            ]
            x, gates = hyper.before(streams, *parameters)
            x = bf16(x)
            x = bf16(reference.normalize(x, block.rms_norm_eps) * weight(norm))
            streams = bf16(hyper.after(bf16(sublayer(x)), streams, gates))
        return streams

    def _attended(self, x: torch.Tensor) -> torch.Tensor:
        attention, part = self.attention, self.attention.part
        attention.hidden = x.to(torch.bfloat16).to(layout.device())
        o = bf16(attention.expected())
        table = part.rotary_emb.cos_sin_cache.cpu()[attention.positions.cpu()].clone()
        table[:, 32:] *= -1
        groups, rank = part.n_local_groups, part.o_lora_rank
        rows = bf16(reference.rotate(o, table[:, None])).view(len(o), groups, -1)
        wo_a = part.wo_a.weight.detach().double().cpu().view(groups, rank, -1)
        low = bf16(torch.einsum("tgd,grd->tgr", rows, wo_a)).flatten(1)
        return low @ matrix(part.wo_b)


class Draft(Decoder):
    """The draft model's layer: its input is the model's streams and the embedding of
    the token drafted from, which does not count at position 0."""

    def __init__(self, seq_lens: Sequence[int]) -> None:
        super().__init__(0, seq_lens, speculative_tokens=1)
        generator = torch.Generator().manual_seed(6)
        shape = (len(seq_lens), self.block.hidden_size)
        embeds = torch.randn(shape, generator=generator)
        self.embeds = embeds.to(torch.bfloat16).to(layout.device())

    def _build(self, config: Any, ratio: int) -> Any:
        self.layer = model_layers.draft_layer(config, Halving)
        self.block = self.layer.mtp_block
        return self.block.attn

    def filled(self) -> torch.nn.Module:
        return self.layer

    def run(self) -> torch.Tensor:
        """The streams after the layer, `[tokens, streams * hidden]`."""
        return self.layer(
            input_ids=None,
            positions=self.attention.positions,
            previous_hidden_states=self.streams.flatten(1),
            inputs_embeds=self.embeds,
        )

    def expected(self) -> torch.Tensor:
        layer, eps = self.layer, self.layer.rms_norm_eps
        first = (self.attention.positions.cpu() == 0)[:, None]
        embeds = self.embeds.cpu().double().masked_fill(first, 0)
        embeds = bf16(reference.normalize(embeds, eps) * weight(layer.enorm))
        previous = reference.normalize(self.streams.cpu(), eps) * weight(layer.hnorm)
        projected = bf16(bf16(previous) @ matrix(layer.h_proj))
        streams = projected + bf16(embeds @ matrix(layer.e_proj))[:, None]
        return self.after_block(bf16(streams)).flatten(1)
