# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of the main cache's compressor."""

import torch

from .._rope import rotate
from .kv_quant import insert_rows


def entries(
    state_cache: torch.Tensor,
    requests: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    compress_ratio: int,
    overlap: bool,
) -> torch.Tensor:
    """The means `[E, 512]` of the windows that end at `positions`, float64.

    A channel without a token is 0.
    """
    blocks, block_size, columns = state_cache.shape
    window = (1 + overlap) * compress_ratio
    index = torch.arange(window, device=positions.device)
    at = positions[:, None] - window + 1 + index
    page = at.div(block_size, rounding_mode="floor")
    in_table = (at >= 0) & (page < block_table.shape[1])
    rows = block_table[requests.long()].long()
    block = rows.gather(1, page.where(in_table, 0)).where(in_table, -1)
    exists = (block >= 0) & (block < blocks)
    state = state_cache[block.where(exists, 0), at.where(exists, 0) % block_size]
    values, scores = state.double().split(columns // 2, dim=-1)
    first = (index >= compress_ratio) * 512
    channels = (first[:, None] + torch.arange(512, device=at.device)).expand_as(
        values[..., :512]
    )
    exists = exists[..., None]
    scores = scores.gather(-1, channels).where(exists, -torch.inf)
    values = values.gather(-1, channels).where(exists, 0.0)
    weights = scores.softmax(1).where(exists, 0.0)
    return (weights * values).sum(1)


def compress_norm_rope_insert(
    state_cache: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    rms_norm_weight: torch.Tensor,
    rms_norm_eps: float,
    cos_sin_cache: torch.Tensor,
    k_cache: torch.Tensor,
    kv_slot_mapping: torch.Tensor,
    compress_ratio: int,
    overlap: bool,
) -> None:
    """See `kernels.xpu_dsv4.kv.compressor.compress_norm_rope_insert`."""
    tokens = slot_mapping.shape[0]
    at, requests = positions[:tokens].long(), token_to_req_indices[:tokens]
    ends = (slot_mapping >= 0) & (at >= 0) & ((at + 1) % compress_ratio == 0)
    ends &= (requests >= 0) & (requests < block_table.shape[0])
    at, requests, slots = at[ends], requests[ends], kv_slot_mapping[:tokens][ends]
    x = entries(state_cache, requests, at, block_table, compress_ratio, overlap)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + rms_norm_eps)
    x = x * rms_norm_weight.double()
    nope, rope = x.split((448, 64), dim=-1)
    rope = rotate(rope, at - compress_ratio + 1, cos_sin_cache)
    rows = torch.cat((nope.float().bfloat16().double(), rope), dim=-1)
    insert_rows(rows, k_cache, slots, k_cache.shape[1])
