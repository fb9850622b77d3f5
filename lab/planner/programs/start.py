# SPDX-License-Identifier: Apache-2.0
"""Run inside an installed vLLM: start an engine of each split, but for the tensors.

`start.py JOB ANSWER`. Each split has a process with the release's own engine core; its
executor has a process for one rank of each stage, with the release's own worker, model
runner and model class. The process groups have the split's size and nobody else in
them, all tensors are on torch's device "meta", and device memory is what JOB says.
"""

import standins.emulated_xpu.pytest_plugin  # noqa: I001 (before torch and vllm)

import contextlib
import functools
import gc
import json
import os
import psutil
import resource
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import forks
import shapes
import stages
import torch
import workspaces
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from standins.emulated_xpu.worker import EmulatedXpuWorker

WITHOUT_VALUES = "without_values"
JOB: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
TENSORS: dict[str, torch.Tensor] = {}
"""What a loader must see of the checkpoint."""
FACTORIES = _device._device_constructors()
"""torch's own, which the emulation replaces once there is pinned memory."""
LISTS = (torch.arange, torch.full, torch.tensor)
PINNED: dict[int, torch.UntypedStorage] = {}
"""What this process's model asked for in the host's memory, for the device to read."""
UNSET: set[str] = set()
"""Parameters of this process's model for which the checkpoint has nothing."""
MODELS: list[torch.nn.Module] = []
"""This process's model, and its draft."""
REAL_MEMORY = psutil.virtual_memory
HOST_EXPERTS = "moe_expert_cache_size"
NO_LIMIT = Path("/nonexistent")
"""The cgroup of another host, of which a plan knows no limits."""
ALONE = "fake"
"""torch's process group whose collectives return at once."""


class OnMeta(TorchFunctionMode):
    """Makes every tensor on "meta", also where the emulated device is asked for, but
    for lists of integers, such as the experts of a rank."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in LISTS:
            made = func(*args, **kwargs | {"device": torch.device("cpu")})
            return made.to("meta") if made.is_floating_point() else made
        if func in FACTORIES:
            kwargs = kwargs | {"device": torch.device("meta")}
        return func(*args, **kwargs)


def remembering_pinned(make: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A factory that knows afterwards what it made in the host's memory."""

    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if pin_memory:
            storage = tensor.untyped_storage()
            PINNED[storage._cdata] = storage
        return tensor

    return made


@register_model_loader(WITHOUT_VALUES)
class Loader(BaseModelLoader):
    """Builds the model on "meta" and loads every tensor's type and shape."""

    def download_model(self, model_config: Any) -> None:
        pass

    def load_weights(self, model: Any, model_config: Any) -> None:
        loaded = model.load_weights(TENSORS.items())
        UNSET.update(name for name, _ in model.named_parameters())
        UNSET.difference_update(loaded)

    def load_model(
        self, vllm_config: Any, model_config: Any, prefix: str = "", **_: Any
    ) -> Any:
        zeros = remembering_pinned(torch.zeros)
        with (
            set_default_torch_dtype(model_config.dtype),
            mock.patch.object(torch, "zeros", zeros),
            OnMeta(),
        ):
            model = initialize_model(
                vllm_config=vllm_config, model_config=model_config, prefix=prefix
            )
            MODELS.append(model)
            self.load_weights(model, model_config)
            process_weights_after_loading(model, model_config, torch.device("cpu"))
        return model.eval()


def stage(vllm_config: Any, number: int) -> dict[str, Any]:
    """What the first rank of a stage answers, and what it holds."""
    parallel = vllm_config.parallel_config
    rank = number * parallel.tensor_parallel_size
    join_alone(rank, parallel.world_size_across_dp)
    # The devices of a plan need not be those of one host.
    local = rank % current_platform.device_count()
    with set_current_vllm_config(vllm_config):
        worker = EmulatedXpuWorker(vllm_config, local, rank, "fake://", number == 0)
        worker.init_device()
        torch.empty = remembering_pinned(torch.empty)
        worker.load_model()
        answers = {"get_kv_cache_spec": worker.get_kv_cache_spec()}
        if hasattr(worker, "get_supported_kv_cache_layouts"):
            layouts = worker.get_supported_kv_cache_layouts()
            answers["get_supported_kv_cache_layouts"] = layouts
        answers["compile_or_warm_up_model"] = worker.compile_or_warm_up_model()
    weights = held(one for model in MODELS for one in model.parameters())
    return {
        "answers": answers,
        "weights": weights,
        "buffers": held(one for model in MODELS for one in tensors(model)) - weights,
        "workspaces": workspaces.reserved(MODELS, vllm_config),
        # As torch's allocator of pinned memory rounds.
        "pinned": sum(1 << (s.nbytes() - 1).bit_length() for s in PINNED.values()),
        "unset": sorted(UNSET),
        **slots(vllm_config),
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def slots(vllm_config: Any) -> dict[str, int]:
    """Experts of a layer on the device and in all, and the bytes of all layers' on this
    rank, once they are loaded."""
    if not getattr(vllm_config.offload_config, HOST_EXPERTS, 0):
        return {}
    from vllm.model_executor.layers.fused_moe import expert_cache

    worker = SimpleNamespace(vllm_config=vllm_config)
    count, experts, size = expert_cache.held_slots(worker)
    return {"slots": count, "slot_bytes": count * size, "of_experts": experts}


def tensors(model: Any) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and what modules keep beside them."""
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from (it for it in vars(module).values() if isinstance(it, torch.Tensor))


def held(found: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors on the device, each counted once."""
    known = {
        id(tensor): tensor
        for tensor in found
        if tensor.untyped_storage()._cdata not in PINNED
    }
    return sum(tensor.numel() * tensor.element_size() for tensor in known.values())


def join_alone(rank: int, world_size: int) -> None:
    """Be `rank` of a world in which every group answers without the others."""
    torch.distributed.init_process_group(
        ALONE, store=FakeStore(), rank=rank, world_size=world_size
    )
    new_group = torch.distributed.new_group

    def group(ranks: Any = None, *_: Any, **__: Any) -> Any:
        return new_group(ranks, backend=ALONE)

    torch.distributed.new_group = group
    # What the host has free is asked of somebody else's host.
    psutil.virtual_memory = of_the_host
    with contextlib.suppress(ImportError):
        from vllm.utils import host_memory

        host_memory.OWN_CGROUP = NO_LIMIT
    torch.distributed.all_gather_object = gather_own
    # Both wait for other processes.
    MessageQueue.create_from_process_group = lambda *_, **__: None
    parallel_state._node_count = lambda _: 1


def gather_own(answers: list[Any], own: Any, *_: Any, **__: Any) -> None:
    """As the others would answer, on one host. It needs values, which nothing has."""
    answers[:] = [own] * len(answers)


def of_the_host() -> Any:
    return REAL_MEMORY()._replace(available=JOB["host"] or 1 << 60)


def left(stages: Iterable[dict[str, Any]]) -> int:
    """Bytes for the KV cache on a device of the fullest of these stages."""
    most = max(
        built["weights"]
        + built["buffers"]
        + built.get("slot_bytes", 0)
        + max(JOB["activations"], JOB["beside_workspaces"] + built["workspaces"])
        for built in stages
    )
    usable = JOB["memory"] * JOB["engine"]["gpu_memory_utilization"]
    return int(usable - most)


class WithoutDevices(Executor):
    """Answers the engine core as the workers of all ranks would."""

    supports_pp = True

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """As the executors of a server do: two steps' tokens are in flight."""
        return True

    def _init_executor(self) -> None:
        if not STAGES:
            keep()
            STAGES.extend(stages.built(self.vllm_config, stage, TENSORS, JOB["cpus"]))
        for built in STAGES:
            built["answers"]["determine_available_memory"] = left([built])

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> list[Any]:
        ranks = self.parallel_config.tensor_parallel_size
        given: dict[str, Any] = getattr(method, "keywords", {})
        own = ASKED.get(getattr(getattr(method, "func", method), "__name__", ""))
        found = [
            own(one, **given) if own else one["answers"].get(method) for one in STAGES
        ]
        return [answer for answer in found for _ in range(ranks)]

    def check_health(self) -> None:
        pass


def held_slots(one: dict[str, Any]) -> tuple[int, int, int]:
    """Of a stage, as the release asks its workers."""
    return one["slots"], one["of_experts"], one["slot_bytes"] // one["slots"]


def take_slots(one: dict[str, Any], slots: int) -> None:
    one["slot_bytes"] = one["slot_bytes"] // one["slots"] * slots
    one["slots"] = slots


ASKED: dict[str, Callable[..., Any]] = {
    "held_slots": held_slots,
    "take_slots": take_slots,
}
"""What the release has its workers call."""
STAGES: list[dict[str, Any]] = []
"""What the stages of this process's split hold, once they are built."""


def split(given: dict[str, Any], known: list[dict[str, Any]]) -> dict[str, Any]:
    """Start the engine core of one split; why it refuses is part of the answer.

    Args:
        given: arguments of the engine, and `partition`, the layers of each stage.
        known: what its stages hold, if they were built for a larger chunk.

    Raises:
        Fault: the planner failed.
    """
    STAGES.extend(known)
    answer: dict[str, Any] = {**given, "refused": "", "stages": STAGES, "blocks": 0}
    arguments = dict(given)
    if partition := arguments.pop("partition", ""):
        os.environ["VLLM_PP_LAYER_PARTITION"] = partition
    try:
        config = configuration(arguments)
        answer["configured"] = True
        decode(config)
        core = EngineCore(config, WithoutDevices, log_stats=False)
        answer |= blocks(config, core.scheduler.kv_cache_config)
    except Exception as error:
        traceback.print_exc()
        kind, answer["refused"] = forks.judged(error)
        if kind is forks.Fault:
            raise
    return answer


def configuration(given: dict[str, Any]) -> Any:
    """vLLM's, of a split.

    Raises:
        Refused: the release has no such option.
    """
    if HOST_EXPERTS in given and not hasattr(EngineArgs, HOST_EXPERTS):
        raise forks.Refused("keeps no experts in host memory: v0.31.0 or newer does")
    return EngineArgs(
        model=JOB["folder"],
        load_format=WITHOUT_VALUES,
        distributed_executor_backend=WithoutDevices,
        **{"skip_tokenizer_init": True} | JOB["engine"] | given,
    ).create_engine_config()


def settle() -> None:
    """Import here what the start of a split imports, once for all; and let no process
    that is forked from this one look for garbage among what it inherits."""
    every: list[dict[str, Any]] = [
        *JOB["splits"],
        *(more["split"] for more in JOB["search"]),
        {},
    ]
    given = {name: every[0][name] for name in every[0] if name != "partition"}
    # Why one refuses, its own process says.
    with contextlib.suppress(Exception):
        configuration(given | {"max_num_batched_tokens": JOB["chunks"][0]})
    keep()


def keep() -> None:
    """Leave what there is out of every later search for garbage: vLLM asks for three
    for each stage, which copied all pages of a process besides."""
    gc.collect()
    gc.freeze()


def blocks(config: Any, cache: Any) -> dict[str, int]:
    """Blocks of the cache, and those of one request of the whole context: while it
    decodes, and while a whole chunk of its prompt is read."""
    decoding = reading = 0
    for group in cache.kv_cache_groups:
        spec = group.kv_cache_spec
        # Layers of one kind may have a specification each.
        spec = next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))
        most = -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)
        window = getattr(spec, "sliding_window", None)
        reading += most
        decoding += min(most, -(-window // spec.block_size) + 1) if window else most
    return {"blocks": cache.num_blocks, "decoding": decoding, "reading": reading}


def decode(config: Any) -> None:
    """Ask the decode kernel for its configuration of a rank's heads."""
    from vllm.model_executor.kernels.xpu_dsv4.mla import _decode_config

    heads = config.model_config.hf_text_config.num_attention_heads
    heads //= config.parallel_config.tensor_parallel_size
    _decode_config.decode_config(config.scheduler_config.max_num_seqs, heads, 8192)


def attempts(given: dict[str, Any]) -> list[dict[str, Any]]:
    """A split with the largest chunk of a prompt with which all requests fit, or else
    the most; and with whole experts on a rank if their parts cannot be built.

    Smaller chunks are asked for with the stages of the largest, whose buffers are a
    little larger; the best of them is started with its own, which carries 18 requests
    on ten B60 and not 17."""

    def attempt(known: Iterable[dict[str, Any]] = (), **more: Any) -> dict[str, Any]:
        work = functools.partial(split, given | more, list(known))
        (found,) = forks.forked([work])
        return dict(found)

    first, *smaller = JOB["chunks"]
    tried = [attempt(max_num_batched_tokens=first)]
    built = tried[0]["stages"]
    if HOST_EXPERTS in given:
        for chunk in smaller:
            if not built or room(tried[-1]) >= JOB["requests"]:
                break
            tried.append(attempt(max_num_batched_tokens=chunk))
        return tried
    if built and room(tried[0]) < JOB["requests"] and left(built) > -NEARLY:
        promised = tried[0]
        for chunk in smaller:
            promising = attempt(built, max_num_batched_tokens=chunk)
            if room(promising) > room(promised) or left(built) <= 0:
                promised = promising
            if room(promised) >= JOB["requests"]:
                break
        if promised is not tried[0]:
            chunk = promised["max_num_batched_tokens"]
            tried.append(attempt(max_num_batched_tokens=chunk))
    whole = given.get("enable_expert_parallel") or given["tensor_parallel_size"] == 1
    if tried[0].get("configured") and not built and not whole:
        tried.append(attempt(max_num_batched_tokens=first, enable_expert_parallel=True))
    return tried


NEARLY = 1 << 30
"""Bytes that the buffers of a chunk may take at most."""


def room(answer: dict[str, Any]) -> int:
    """Requests that fit beside a chunk that is read."""
    if not answer["blocks"]:
        return 0
    read = answer["reading"] - answer["decoding"]
    return max(0, int((answer["blocks"] - read) // answer["decoding"]))


def started() -> Iterator[dict[str, Any]]:
    """Every split that must be started; then, in their order, those of the search, up
    to the first that carries all requests."""
    carried = False
    for given in JOB["splits"]:
        found = attempts(given)
        carried |= any(room(one) >= JOB["requests"] for one in found)
        yield from found
    for more in JOB["search"]:
        if carried and more["devices"] > JOB["devices"]:
            break
        found = attempts(more["split"])
        yield from ({**one, "searched": True} for one in found)
        if any(room(one) >= JOB["requests"] for one in found):
            break


def main() -> None:
    standins.emulated_xpu.pytest_plugin.prepare()
    # A model's class is looked at here, not in a process that imports vLLM anew.
    registry._run_in_subprocess = lambda look: look()
    answer: dict[str, Any]
    try:
        whole = shapes.known(JOB, Path(JOB["folder"]))
        drafting = bool(JOB["engine"].get("speculative_config"))
        config = shapes.text_config(Path(JOB["folder"]))
        TENSORS.update(shapes.loadable(whole, config, drafting))
        settle()
        found = list(started())
        for one in found:
            one["room"] = room(one) * one.get("data_parallel_size", 1)
            for built in one["stages"]:
                del built["answers"]
        answer = {"checkpoint": held(whole.values()), "attempts": found}
    except Exception as error:
        kind, said = forks.judged(error)
        answer = {"refused" if kind is forks.Refused else "fault": said}
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
