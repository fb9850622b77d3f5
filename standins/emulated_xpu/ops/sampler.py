# SPDX-License-Identifier: Apache-2.0
"""Random sampling among the most likely tokens."""

import torch

from standins.emulated_xpu.wheel.implementations import implements


@implements("_xpu_C::topk_topp_sampler")
def topk_topp_sampler(
    random_sampled: torch.Tensor,
    logits_to_return: torch.Tensor | None,
    logits: torch.Tensor,
    k: torch.Tensor | None,
    p: torch.Tensor | None,
    logprobs_mode: str,
    seeds: torch.Tensor,
    rate: float,
) -> None:
    """Write one token of each row of `logits`, `[R, V]`, into `random_sampled`, `[R]`.

    A row keeps its `k` largest logits, of those the fewest whose probabilities reach
    `p`. The draws are torch's: `seeds` is not read.
    """
    values, order = logits.float().sort(dim=-1, descending=True)
    place = torch.arange(logits.shape[1], device=logits.device)
    kept = torch.ones_like(values, dtype=torch.bool)
    if k is not None:
        kept &= place < k[:, None]
    if p is not None:
        likely = values.masked_fill(~kept, -torch.inf).softmax(-1)
        kept &= likely.cumsum(-1) - likely < p[:, None]
    values = values.masked_fill(~kept, -torch.inf)
    noise = torch.empty_like(values).exponential_(rate)
    best = (values.softmax(-1) / noise).argmax(-1, keepdim=True)
    random_sampled.copy_(order.gather(1, best)[:, 0])
    if logits_to_return is not None:
        given = values.log_softmax(-1) if "logprobs" in logprobs_mode else values
        logits_to_return.scatter_(1, order, given)
