# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Routed experts in pinned host memory: what is refused, whether they fit, and how many
slots a layer gets on the device."""

from collections.abc import Callable
from math import prod

import torch

from vllm.config import (
    VllmConfig,
    get_current_vllm_config,
    get_current_vllm_config_or_none,
)
from vllm.distributed import get_world_group
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.host_memory import BOOT_ID, free_host_memory
from vllm.utils.math_utils import next_power_of_2
from vllm.utils.mem_constants import GiB_bytes

logger = init_logger(__name__)

FLAG = "--moe-expert-cache-size"
RESERVE = 4 * GiB_bytes
"""Of the device, for activations, KV cache and a draft, if the slots are not given."""


def expert_cache_size() -> int:
    """Slots of a layer; -1 for as many as fit, 0 for experts on the device."""
    config = get_current_vllm_config_or_none()
    return 0 if config is None else config.offload_config.moe_expert_cache_size


def check_expert_cache(vllm_config: VllmConfig) -> None:
    """Refuse what does not work while experts are in host memory.

    Raises:
        ValueError: naming what to drop.

    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for flag, is_set in (
        ("--enable-eplb", parallel.enable_eplb),
        ("--enable-expert-parallel", parallel.enable_expert_parallel),
        ("--data-parallel-size", parallel.data_parallel_size > 1),
        ("--enable-sleep-mode", model is not None and model.enable_sleep_mode),
    ):
        if is_set:
            raise ValueError(
                f"{FLAG} keeps experts in host memory, which does not work with "
                f"{flag}: drop one of the two"
            )


def host_experts(
    layer_name: str, moe: FusedMoEConfig, *shapes: tuple[int, ...]
) -> Callable[..., torch.Tensor]:
    """Check that experts fit into host memory before a layer's are allocated.

    The first layer of this process counts all its layers, and those of the other
    processes on this host; a later one counts itself.

    Args:
        layer_name: of the experts.
        moe: of the layer.
        shapes: of the layer's tensors of uint8.

    Returns:
        `torch.zeros` for pinned host memory.

    Raises:
        ValueError: a token has more experts than slots, or the experts do not fit.

    """
    slots, least = expert_cache_size(), moe.experts_per_token
    if 0 < slots < least:
        raise ValueError(
            f"{FLAG} {slots} is less than the {least} experts of a token: {least} is "
            f"the least that works"
        )
    # Torch pins powers of two.
    size = sum(next_power_of_2(prod(shape)) for shape in shapes)
    layers, is_first = _layers(layer_name)
    needed, free = size, free_host_memory()
    if is_first:
        needed = _of_this_host(layers * size)
        logger.info(
            "Experts: %.2f GiB of pinned memory of this host, of which %.2f GiB are "
            "free.",
            needed / GiB_bytes,
            free / GiB_bytes,
        )
    if needed > free:
        raise ValueError(
            f"{layer_name}: experts need {needed / GiB_bytes:.2f} GiB of host memory, "
            f"of which {free / GiB_bytes:.2f} GiB are free: "
            f"{(needed - free) / GiB_bytes:.2f} GiB are missing; add memory, raise the "
            f"container's limit, or drop {FLAG}"
        )

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        try:
            # Model initialization may be inside a device context.
            return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError as error:
            raise RuntimeError(
                f"{layer_name}: the driver did not pin {prod(shape)} bytes of host "
                f"memory for experts. Free memory of the host, raise the container's "
                f"limit, or drop {FLAG}"
            ) from error

    return zeros


def num_slots(layer_name: str, moe: FusedMoEConfig, expert_bytes: int) -> int:
    """Slots of a layer whose experts have `expert_bytes` bytes on this rank each.

    Raises:
        ValueError: the device has no room for the experts of a token.

    """
    config = get_current_vllm_config()
    layers, is_first = _layers(layer_name)
    slots, least = expert_cache_size(), moe.experts_per_token
    if slots < 0:
        free, total = torch.accelerator.get_memory_info()
        room = config.cache_config.gpu_memory_utilization * total - (total - free)
        slots = max(int(room - RESERVE), 0) // (layers * expert_bytes)
        if slots < least:
            raise ValueError(
                f"{FLAG} auto: the device has room for {slots} experts a layer, and a "
                f"token needs {least}: raise --gpu-memory-utilization or "
                f"--tensor-parallel-size"
            )
        # A draft's layers, which are loaded later, get as many.
        config.offload_config.moe_expert_cache_size = slots
    slots = min(slots, moe.num_experts)
    if is_first:
        logger.info(
            "Experts on the device: %d of %d a layer, %.2f GiB. A token reads at most "
            "%.2f GiB over the link, if none of its experts is among them.",
            slots,
            moe.num_experts,
            layers * slots * expert_bytes / GiB_bytes,
            layers * least * expert_bytes / GiB_bytes,
        )
    return slots


def _layers(layer_name: str) -> tuple[int, bool]:
    """How many layers this process has, and whether this is the first of them."""
    config = get_current_vllm_config()
    start, end = config.model_config.get_layers_start_end_indices(
        config.parallel_config
    )
    return end - start, extract_layer_index(layer_name) == start


def _of_this_host(size: int) -> int:
    """The sum of `size` over the ranks of this host.

    Returns when all ranks have seen how much is free: what others allocate must not
    count as memory that is missing.
    """
    group = get_world_group()
    mine = BOOT_ID.read_text(), size
    found: list[tuple[str, int]] = [mine] * group.world_size
    torch.distributed.all_gather_object(found, mine, group=group.cpu_group)
    return sum(bytes_ for host, bytes_ in found if host == mine[0])
