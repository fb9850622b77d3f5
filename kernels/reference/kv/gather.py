# SPDX-License-Identifier: Apache-2.0
"""Float64 reference of the gather from FP8 pages, one token at a time."""

import torch

from ..pages import decode_token


def dequantize_and_gather_k_cache(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
) -> None:
    """See `kernels.xpu_dsv4.kv.gather.dequantize_and_gather_k_cache`."""
    for request, seq_len in enumerate(seq_lens.tolist()):
        count = seq_len if gather_lens is None else int(gather_lens[request])
        for i in range(min(count, out.shape[1] - offset)):
            logical, position = divmod(seq_len - count + i, block_size)
            known = 0 <= logical < block_table.shape[1]
            block = int(block_table[request, logical]) if known else -1
            out[request, offset + i] = (
                decode_token(k_cache, block * block_size + position)
                if 0 <= block < k_cache.shape[0]
                else 0
            )
