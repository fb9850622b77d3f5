# SPDX-License-Identifier: Apache-2.0
"""The router's choice of experts, of vllm-xpu-kernels 0.1.15.4."""

import torch

from standins.emulated_xpu.wheel.implementations import implements

IMAGE_TOKENS = 5
"""How many token ids stand for parts of an image."""


@implements("_moe_C::topk_softplus_sqrt")
def topk_softplus_sqrt(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool,
    routed_scaling_factor: float,
    correction_bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
    bias_vl: torch.Tensor | None = None,
    image_sentinel_lo: int = 0,
) -> None:
    """The weights are sqrt(softplus(logit)). A table chooses the experts, or the
    largest weight plus bias.

    A token of an image has one of five ids from `image_sentinel_lo` on, none if that is
    0. `bias_vl` chooses its experts, in place of the table or the other bias. A padded
    token gets no expert: index -1 and weight 0.
    """
    count = topk_indices.shape[1]
    scores = torch.nn.functional.softplus(gating_output.float()).sqrt()
    if tid2eid is not None and input_ids is not None:
        chosen = tid2eid[input_ids.long()].long()
    else:
        biased = scores if correction_bias is None else scores + correction_bias
        chosen = biased.topk(count, dim=-1).indices
    if bias_vl is not None and image_sentinel_lo > 0:
        if input_ids is None:
            raise ValueError("topk_softplus_sqrt: bias_vl without input_ids")
        kind = input_ids - image_sentinel_lo
        by_image = (scores + bias_vl).topk(count, dim=-1).indices
        is_image = (kind >= 0) & (kind < IMAGE_TOKENS)
        chosen = torch.where(is_image[:, None], by_image, chosen)
    weights = scores.gather(1, chosen)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * routed_scaling_factor
    if is_padding is not None:
        weights = weights.masked_fill(is_padding[:, None], 0.0)
        chosen = chosen.masked_fill(is_padding[:, None], -1)
    topk_weights.copy_(weights)
    topk_indices.copy_(chosen)
