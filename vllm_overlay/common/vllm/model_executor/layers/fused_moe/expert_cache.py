# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Routed experts in pinned host memory: what is refused, whether they fit, and how many
slots a layer gets on the device.

How many fit, the engine knows once workers have profiled a step with the fewest: what
the KV cache of all requests leaves is shared among the layers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import torch

from vllm import envs
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
from vllm.utils.math_utils import cdiv, next_power_of_2
from vllm.utils.mem_constants import GiB_bytes

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.experts.xpu_cached_moe import (
        XPUCachedExpertsMxFp4,
    )
    from vllm.v1.executor import Executor
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.worker_base import WorkerBase

logger = init_logger(__name__)

FLAG = "--moe-expert-cache-size"


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
    if vllm_config.offload_config.moe_expert_cache_size < 0 and (
        envs.VLLM_ENABLE_STARTUP_PLAN or vllm_config.cache_config.kv_cache_memory_bytes
    ):
        raise ValueError(
            f"{FLAG} auto needs the memory that a step takes, which nobody measures "
            f"with --kv-cache-memory-bytes or VLLM_ENABLE_STARTUP_PLAN: drop those, or "
            f"give a number"
        )
    for flag, is_set in (
        ("--enable-eplb", parallel.enable_eplb),
        ("--enable-expert-parallel", parallel.enable_expert_parallel),
        ("--data-parallel-size", parallel.data_parallel_size > 1),
        ("--enable-sleep-mode", model is not None and model.enable_sleep_mode),
        ("--weight-transfer-config", vllm_config.weight_transfer_config is not None),
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
            "Experts: %.2f GiB of pinned memory of this host; %.2f GiB are free.",
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
    """Slots of a layer when it is loaded: the fewest, if as many as fit are wanted.

    Args:
        layer_name: of the experts.
        moe: of the layer.
        expert_bytes: bytes of an expert on this rank.

    """
    slots, least = expert_cache_size(), moe.experts_per_token
    if slots < 0:
        return least
    slots = min(slots, moe.num_experts)
    layers, is_first = _layers(layer_name)
    if is_first:
        _say_slots(slots, moe.num_experts, least, layers * expert_bytes)
    return slots


def fill_expert_cache(
    executor: "Executor",
    vllm_config: VllmConfig,
    kv_cache_configs: "Sequence[KVCacheConfig]",
    available_memory: Sequence[int],
) -> list[int]:
    """Give experts the memory that the KV cache of `max_num_seqs` requests of
    `max_model_len` tokens leaves: as many slots on each worker.

    Args:
        executor: of the workers, whose layers have the fewest slots.
        vllm_config: of the engine.
        kv_cache_configs: of each worker, if the KV cache takes `available_memory`.
        available_memory: bytes of each worker beside those slots.

    Returns:
        Bytes that are left for the KV cache of each worker.

    """
    requests = vllm_config.scheduler_config.max_num_seqs
    # Block 0 is nobody's.
    wanted = 1 + max(
        _blocks(vllm_config, config, requests) for config in kv_cache_configs
    )
    found: list[tuple[int, int, int]] = executor.collective_rpc(held_slots)
    extra = []
    for config, memory, (_, _, slot_bytes) in zip(
        kv_cache_configs, available_memory, found, strict=True
    ):
        pages = max(one.size for one in config.kv_cache_tensors)
        kept = min(wanted, config.num_blocks) * pages // config.num_blocks
        extra.append(max(memory - kept, 0) // slot_bytes)
    least, experts, _ = found[0]
    more = min(*extra, experts - least)
    if more:
        executor.collective_rpc(partial(take_slots, slots=least + more))
    else:
        logger.warning(
            "%s auto: a layer gets no more than the %d experts of a token. The KV "
            "cache of --max-num-seqs %d requests of --max-model-len %d tokens comes "
            "first: lower them.",
            FLAG,
            least,
            requests,
            vllm_config.model_config.max_model_len,
        )
    _say_slots(least + more, experts, least, found[0][2])
    return [
        memory - more * slot_bytes
        for memory, (_, _, slot_bytes) in zip(available_memory, found, strict=True)
    ]


def held_slots(worker: "WorkerBase") -> tuple[int, int, int]:
    """Of a worker: slots of a layer, its experts, and bytes of a slot of all layers."""
    caches = [one.cache for one in cached_layers(worker.vllm_config)]
    slots, experts = (len(t) for t in (caches[0].expert_of, caches[0].slot_of))
    return slots, experts, sum(cache.expert_bytes for cache in caches)


def take_slots(worker: "WorkerBase", slots: int) -> None:
    """Give each layer of a worker other slots, which are empty."""
    layers = cached_layers(worker.vllm_config)
    hosts = [layer.drop_slots() for layer in layers]
    torch.accelerator.empty_cache()
    for layer, host in zip(layers, hosts, strict=True):
        layer.take_slots(host, slots)
    worker.vllm_config.offload_config.moe_expert_cache_size = slots


def cached_layers(vllm_config: VllmConfig) -> "list[XPUCachedExpertsMxFp4]":
    """Those of all layers of this process, its draft's among them."""
    config = vllm_config.compilation_config
    layers = (
        config.static_forward_context[name].routed_experts
        for name in config.static_all_moe_layers
    )
    return [layer.quant_method.moe_kernel.fused_experts for layer in layers]


def _blocks(vllm_config: VllmConfig, config: "KVCacheConfig", requests: int) -> int:
    """Blocks of so many requests of the longest context, while one of them reads a
    chunk of its prompt."""
    decoding = reading = 0
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        most = cdiv(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes)
        one = next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))
        window = getattr(one, "sliding_window", None)
        reading += most
        decoding += min(most, cdiv(window, one.block_size) + 1) if window else most
    return requests * decoding + reading - decoding


def _say_slots(slots: int, experts: int, least: int, slot_bytes: int) -> None:
    logger.info(
        "Experts on the device: %d of %d a layer, %.2f GiB. A token reads at most "
        "%.2f GiB over the link, if none of its experts is among them.",
        slots,
        experts,
        slots * slot_bytes / GiB_bytes,
        least * slot_bytes / GiB_bytes,
    )


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
