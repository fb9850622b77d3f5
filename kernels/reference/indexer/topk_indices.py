# SPDX-License-Identifier: Apache-2.0
"""Reference of the arithmetic on chosen positions, one token at a time."""

import torch


def compute_global_topk_indices_and_lens(
    topk_indices: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    is_valid_token: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `xpu_dsv4.indexer.topk_indices.compute_global_topk_indices_and_lens`."""
    slots = torch.full_like(topk_indices, -1)
    requests, width = block_table.shape
    for t, request in enumerate(token_to_req_indices.tolist()):
        if not is_valid_token[t] or not 0 <= request < requests:
            continue
        for c, index in enumerate(topk_indices[t].tolist()):
            if index < 0 or index // block_size >= width:
                continue
            block = int(block_table[request, index // block_size])
            if block >= 0:
                slots[t, c] = block * block_size + index % block_size
    lens = (slots >= 0).sum(-1).int()
    if out is None:
        return slots, lens
    return out[0].copy_(slots), out[1].copy_(lens)


def combine_topk_swa_indices(
    topk_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    left_visible: torch.Tensor | None = None,
    right_visible: torch.Tensor | None = None,
    max_image_tokens: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.xpu_dsv4.indexer.topk_indices.combine_topk_swa_indices`."""
    tokens = topk_indices.shape[0]
    width = -(-(topk + window_size + max_image_tokens) // 128) * 128
    indices = torch.full((tokens, width), -1, dtype=torch.int32)
    lens = torch.zeros(tokens, dtype=torch.int32)
    starts = (query_start_loc - query_start_loc[0]).tolist()
    for r in range(seq_lens.shape[0]):
        seq_len, gathered = int(seq_lens[r]), int(gather_lens[r])
        for t in range(starts[r], min(starts[r + 1], tokens)):
            position = seq_len - (starts[r + 1] - t)
            if position < 0:
                continue
            chosen = topk_indices[t, : min((position + 1) // compress_ratio, topk)]
            row = [r * M + i if i >= 0 else -1 for i in chosen.tolist()]
            row += [-1] * (min((position + 1) // compress_ratio, topk) - len(row))
            left = 0 if left_visible is None else int(left_visible[t])
            right = 0 if right_visible is None else int(right_visible[t])
            first = max(position - max(window_size - 1, left), 0)
            seen = range(first, position + right + 1)[-(width - len(row)) :]
            row += [r * M + N + p - (seq_len - gathered) for p in seen]
            indices[t, : len(row)] = torch.tensor(row, dtype=torch.int32)
            lens[t] = len(row)
    indices, lens = indices.to(topk_indices.device), lens.to(topk_indices.device)
    if out is not None:
        return out[0].copy_(indices), out[1].copy_(lens)
    return indices, lens
