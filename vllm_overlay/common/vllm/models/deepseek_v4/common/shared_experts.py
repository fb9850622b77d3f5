# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Block-FP8 shared experts of DeepSeek V4 that the TP ranks do not divide.

A block has one scale, so a rank holds whole blocks. Layer and loaders round the
intermediate size up to as many blocks for each rank; what is added is zero, and
silu(0) * 0 adds nothing.
"""

import torch

from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.utils.math_utils import cdiv


def pad_shared_expert_size(
    quant_config: QuantizationConfig | None, intermediate_size: int
) -> int:
    """Return the intermediate size of which each TP rank has whole blocks."""
    block_size = getattr(quant_config, "weight_block_size", None)
    if block_size is None:
        return intermediate_size
    tp_size = get_tensor_model_parallel_world_size()
    return cdiv(intermediate_size // block_size[0], tp_size) * block_size[0] * tp_size


def pad_shared_expert_weight(
    quant_config: QuantizationConfig | None,
    name: str,
    loaded_weight: torch.Tensor,
) -> torch.Tensor:
    """Zero-pad a weight, or its block scales, to `pad_shared_expert_size`.

    Args:
        quant_config: Quantization of the model; without blocks nothing is padded.
        name: Name of the parameter: `down_proj` is padded along its columns, `w1`
            and `w3` along their rows. A scale counts blocks, a weight elements.
        loaded_weight: The whole tensor of the checkpoint.

    Returns:
        The padded tensor, which the TP loaders split evenly.

    """
    block_size = getattr(quant_config, "weight_block_size", None)
    if block_size is None:
        return loaded_weight
    is_scale = name.endswith(("weight_scale_inv", "weight_scale"))
    multiple = get_tensor_model_parallel_world_size() * (
        1 if is_scale else block_size[0]
    )
    dim = 1 if ".down_proj." in name else 0
    missing = -loaded_weight.shape[dim] % multiple
    if missing == 0:
        return loaded_weight
    shape = list(loaded_weight.shape)
    shape[dim] = missing
    return torch.cat((loaded_weight, loaded_weight.new_zeros(shape)), dim=dim)
