# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of MLA prefill over ranges of gathered bf16 rows."""

import torch

from . import sparse_prefill


def xpu_range_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_row: int,
    window_size: int,
    compress_ratio: int,
    sm_scale: float,
    attn_sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    magnitude: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kernels.xpu_dsv4.range_prefill.xpu_range_prefill`; float64.

    `magnitude`, of `q`'s shape, gets the same sum with |v|.
    """
    result = torch.zeros(q.shape, dtype=torch.float64)
    starts = (query_start_loc - query_start_loc[0]).tolist()
    for request, rows in enumerate(kv):
        length, gathered = int(seq_lens[request]), int(gather_lens[request])
        first, last = starts[request : request + 2]
        for token in range(first, last):
            position = length - last + token
            compressed = min((position + 1) // max(compress_ratio, 1), window_row)
            oldest = max(position - window_size + 1, length - gathered)
            window = torch.arange(oldest, position + 1) - (length - gathered)
            chosen = torch.cat((torch.arange(compressed), window_row + window))
            one = slice(token, token + 1)
            result[one] = sparse_prefill.xpu_sparse_prefill(
                q[one],
                rows[:, None],
                chosen[None],
                sm_scale,
                attn_sink,
                magnitude=None if magnitude is None else magnitude[one],
            )
    if out is not None:
        out.copy_(result)
    return result
