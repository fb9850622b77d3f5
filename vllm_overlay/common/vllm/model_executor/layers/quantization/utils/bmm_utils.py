# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

from collections.abc import Callable
from typing import cast

import torch


def unpack_bmm_weight(
    layer: torch.nn.Module,
    apply_weights: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor],
) -> None:
    """Replace the packed parameters of a linear layer without bias by its `weight`.

    A layer with is_bmm is multiplied group by group, and a kernel without a batch
    dimension cannot do that. `apply_weights` multiplies the identity by the packed
    weight, which gives the weight itself, `[N, K]`, in any layout that a kernel reads.
    """
    packed = dict(layer.named_parameters(recurse=False))
    identity = torch.eye(
        cast(int, layer.input_size_per_partition),
        dtype=cast(torch.dtype, layer.params_dtype),
        device=next(iter(packed.values())).device,
    )
    weight = apply_weights(layer, identity).t().contiguous()
    for name in packed:
        delattr(layer, name)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
