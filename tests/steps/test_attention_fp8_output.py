# SPDX-License-Identifier: Apache-2.0
"""Attention writes the operands of wo_a's FP8 product, so nothing runs in between."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import kernel_trace, layer_parts, layout
from helpers import output_projection as projection
from helpers import reference_attention as reference
from helpers.attention_batch import Batch, random_sinks
from helpers.block_fp8 import BLOCK, as_e4m3, load

ATTENTION_TOLERANCE = 4e-3
BATCHES = {
    "decode": ((600, 131), (1, 1)),
    "prefill": ((260, 9), (2, 3)),
    "both": ((131, 259), (1, 2)),
}


def loaded(ratio: int, seq_lens: Sequence[int], new: Sequence[int]) -> Any:
    """A batch for a layer with FP8 weights, and what its wo_a stands for."""
    batch = Batch(
        ratio,
        seq_lens,
        new,
        sinks=random_sinks(),
        attend=layer_parts.attend,
        quantized=True,
    )
    weight = load(batch.whole.wo_a)
    layer_parts.finish_loading(batch.whole)
    batch.whole.wo_b = torch.nn.Identity()
    return batch, weight


def allocated(layer: Any, tokens: int) -> Any:
    """What a forward of `layer` lets attention write to, full of NaN."""
    like = torch.empty(tokens, 256, dtype=torch.bfloat16, device=layout.device())
    allocate = getattr(layer, "_alloc_attn_out", None)
    if allocate is None:
        shape = (tokens, layer.padded_heads, reference.HEAD_DIM)
        return like.new_full(shape, torch.nan)
    output = allocate(tokens, like)
    if isinstance(output, torch.Tensor):
        return output.fill_(torch.nan)
    output.data.view(torch.uint8).fill_(0x7F)
    output.scale.fill_(torch.nan)
    return output


@pytest.mark.parametrize(
    ("ratio", "kind"), [(0, "both"), (4, "decode"), (4, "prefill"), (128, "both")]
)
def test_the_product_follows_attention(
    ratio: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, weight = loaded(ratio, *BATCHES[kind])
    layer, queries = batch.whole, batch.queries
    positions = torch.tensor(batch.positions())
    at = positions.to(queries.device)
    with batch.ready() as run:
        rows = run().cpu()
        output = allocated(layer, len(at))
        with kernel_trace.traced(monkeypatch) as trace:
            batch.attend(queries, queries, at, output)
            attention = len(trace.launches)
            projected = layer._o_proj(output, at)

    error = reference.relative(rows, batch.expected(random_sinks()))
    assert error < ATTENTION_TOLERANCE, f"attention is off by {error:.2%}"
    table = layer.rotary_emb.cos_sin_cache.cpu()[positions]
    rows = projection.inverse_rope(rows, table)
    groups, rank = layer.n_local_groups, layer.o_lora_rank
    rows = as_e4m3(rows.view(len(rows), groups, -1), BLOCK, power_of_two=True)
    wanted = torch.einsum("tgd,grd->tgr", rows, weight.view(groups, rank, -1))
    error = reference.relative(projected, wanted.flatten(1))
    assert error < projection.TOLERANCE, f"the output projection is off by {error:.3f}"
    between = trace.launches[attention:]
    copies = [name for name in trace.made if "copy" in name or "clone" in name]
    print(f"figure: off by {error:.4f}, {between} and {copies} before the product")
    assert not between, f"launches {between} between attention and the product"
    # That of the product's rows, which wo_b takes by tokens.
    assert len(copies) <= 1, f"copies {copies}"


@pytest.mark.unchanged
def test_a_profile_run_gives_zeros() -> None:
    batch, _ = loaded(4, (5,), (2,))
    tokens = batch.queries
    at = torch.arange(len(tokens), device=tokens.device)
    output = allocated(batch.whole, len(tokens))
    metadata, batch.metadata = batch.metadata, None
    with batch.ready():
        batch.attend(tokens, tokens, at, output)
    batch.metadata = metadata
    assert not batch.whole._o_proj(output, at).any()


@pytest.mark.unchanged
def test_a_profile_run_gives_zeros_in_bf16() -> None:
    batch = Batch(4, (5,), (2,), sinks=random_sinks(), attend=layer_parts.attend)
    output = torch.full_like(batch.queries, torch.nan)
    positions = torch.arange(2, device=output.device)
    metadata, batch.metadata = batch.metadata, None
    with batch.ready():
        batch.attend(batch.queries, batch.queries, positions, output)
    batch.metadata = metadata
    assert not output.any()


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_other_platforms_get_their_heads_in_bf16() -> None:
    base = layout.module(layout.ATTENTION).DeepseekV4Attention
    heads, padded, width = 3, 8, 16
    seen: list[torch.Tensor] = []

    class OtherAttention(base):  # type: ignore[misc, valid-type]
        """A layer of another platform, in which attention gives the heads' numbers."""

        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.n_local_heads, self.padded_heads = heads, padded
            self.head_dim = width
            self._prepare_and_attn_fn = lambda *rows: rows[-1].copy_(
                torch.arange(padded)[None, :, None].expand_as(rows[-1])
            )

        def _run_parallel_input_projections(self, hidden: torch.Tensor) -> Any:
            return hidden, None, None, None

        def _split_qkv_and_norm(self, qr_kv: torch.Tensor) -> Any:
            return qr_kv, None, qr_kv

        def _o_proj(self, o: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            seen.append(o)
            return o

        forward_mqa = get_padded_num_q_heads = None

    layer = OtherAttention()
    layer(torch.arange(2), torch.zeros(2, 4, dtype=torch.bfloat16))
    assert seen[0].dtype == torch.bfloat16
    wanted = torch.arange(heads)[None, :, None].expand(2, heads, width)
    assert torch.equal(seen[0].float(), wanted.float())
