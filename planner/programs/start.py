# SPDX-License-Identifier: Apache-2.0
"""Run inside an installed vLLM: start an engine of each split, but for the tensors.

`start.py JOB ANSWER`. Each split has a process with the release's own engine core; its
executor has a process for one rank of each stage, with the release's own worker, model
runner and model class. The process groups have the split's size and nobody else in
them, all tensors are on torch's device "meta", and device memory is what JOB says.
"""

import emulated_xpu.pytest_plugin  # noqa: I001 (before torch and vllm)

import functools
import json
import os
import pickle
import psutil
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import shapes
import torch
from pydantic import ValidationError
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
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

WITHOUT_VALUES = "without_values"
JOB: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
TENSORS: dict[str, torch.Tensor] = {}
FACTORIES = _device._device_constructors()
"""torch's own, which the emulation replaces once there is pinned memory."""
LISTS = (torch.arange, torch.full, torch.tensor)
PINNED: dict[int, torch.UntypedStorage] = {}
"""What this process's model asked for in the host's memory, for the device to read."""
UNSET: set[str] = set()
"""Parameters of this process's model for which the checkpoint has nothing."""
REAL_MEMORY = psutil.virtual_memory
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
        experts = model_config.hf_text_config.n_routed_experts
        loaded = model.load_weights(shapes.loadable(TENSORS, experts))
        UNSET.update(name for name, _ in model.named_parameters())
        UNSET.difference_update(loaded)

    def load_model(
        self, vllm_config: Any, model_config: Any, *_: Any, **given: Any
    ) -> Any:
        with set_default_torch_dtype(model_config.dtype), OnMeta():
            model = initialize_model(vllm_config=vllm_config, model_config=model_config)
            self.load_weights(model, model_config)
            process_weights_after_loading(model, model_config, torch.device("cpu"))
        return model.eval()


def forked(work: Callable[[], Any]) -> Any:
    """What `work` returns in a process of its own.

    Raises:
        RuntimeError: it raised there; the message is its last line.
    """
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            try:
                found = (True, work())
            except BaseException as error:
                traceback.print_exc()
                found = (False, f"{type(error).__name__}: {error}")
            pickle.dump(found, file)
            file.flush()
            sys.stderr.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        file.seek(0)
        if status:
            raise RuntimeError(f"a process ended with status {status}")
        well, result = pickle.load(file)
    if not well:
        raise RuntimeError(result)
    return result


def stage(vllm_config: Any, number: int) -> dict[str, Any]:
    """What the first rank of a stage answers, and what it holds."""
    from emulated_xpu.worker import EmulatedXpuWorker

    parallel = vllm_config.parallel_config
    rank = number * parallel.tensor_parallel_size
    join_alone(rank, parallel.world_size_across_dp)
    with set_current_vllm_config(vllm_config):
        worker = EmulatedXpuWorker(vllm_config, rank, rank, "fake://", number == 0)
        worker.init_device()
        torch.empty = remembering_pinned(torch.empty)
        worker.load_model()
        answers = {"get_kv_cache_spec": worker.get_kv_cache_spec()}
        if hasattr(worker, "get_supported_kv_cache_layouts"):
            layouts = worker.get_supported_kv_cache_layouts()
            answers["get_supported_kv_cache_layouts"] = layouts
        answers["compile_or_warm_up_model"] = worker.compile_or_warm_up_model()
    model = worker.model_runner.model
    weights = held(model.parameters())
    return {
        "answers": answers,
        "weights": weights,
        "buffers": held(tensors(model)) - weights,
        # As torch's allocator of pinned memory rounds.
        "pinned": sum(1 << (s.nbytes() - 1).bit_length() for s in PINNED.values()),
        "unset": sorted(UNSET),
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


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
    psutil.virtual_memory = unlimited
    torch.distributed.all_gather_object = gather_own
    # Both wait for other processes.
    MessageQueue.create_from_process_group = lambda *_, **__: None
    parallel_state._node_count = lambda _: 1


def gather_own(answers: list[Any], own: Any, *_: Any, **__: Any) -> None:
    """As the others would answer, on one host. It needs values, which nothing has."""
    answers[:] = [own] * len(answers)


def unlimited() -> Any:
    return REAL_MEMORY()._replace(available=1 << 60)


def left(stages: Iterable[dict[str, Any]]) -> int:
    """Bytes for the KV cache on a device of the fullest of these stages."""
    most = max(built["weights"] + built["buffers"] for built in stages)
    usable = JOB["memory"] * JOB["engine"]["gpu_memory_utilization"]
    return int(usable - JOB["activations"] - most)


class WithoutDevices(Executor):
    """Answers the engine core as the workers of all ranks would."""

    supports_pp = True
    stages: list[dict[str, Any]]

    def _init_executor(self) -> None:
        count = self.parallel_config.pipeline_parallel_size
        self.stages = []
        for number in range(count):
            built = forked(functools.partial(stage, self.vllm_config, number))
            built["answers"]["determine_available_memory"] = left([built])
            self.stages.append(built)
            STAGES.append({k: v for k, v in built.items() if k != "answers"})

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> list[Any]:
        ranks = self.parallel_config.tensor_parallel_size
        return [one["answers"].get(method) for one in self.stages for _ in range(ranks)]

    def check_health(self) -> None:
        pass


STAGES: list[dict[str, Any]] = []
"""What the stages of this process's split hold, as far as they were built."""


def split(given: dict[str, Any], model: str) -> dict[str, Any]:
    """Start the engine core of one split; why it refuses is part of the answer."""
    answer: dict[str, Any] = {**given, "refused": "", "stages": STAGES, "blocks": 0}
    try:
        config = EngineArgs(
            model=model,
            load_format=WITHOUT_VALUES,
            distributed_executor_backend=WithoutDevices,
            **{"skip_tokenizer_init": True} | JOB["engine"] | given,
        ).create_engine_config()
        answer["configured"] = True
        decode(config)
        core = EngineCore(config, WithoutDevices, log_stats=False)
        answer |= blocks(config, core.scheduler.kv_cache_config)
    except Exception as error:
        traceback.print_exc()
        answer["refused"] = reason(error)
    return answer


def reason(error: Exception) -> str:
    """What an error says, without what pydantic puts around it."""
    if isinstance(error, ValidationError):
        said = (str(one["msg"]) for one in error.errors())
        return "; ".join(text.removeprefix("Value error, ") for text in said)
    return str(error)


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
    try:
        from vllm.model_executor.kernels.xpu_dsv4 import _decode_config as kernel
    except ImportError:
        from vllm.v1.attention.ops.xpu_dsv4 import _decode_config as kernel
    heads = config.model_config.hf_text_config.num_attention_heads
    heads //= config.parallel_config.tensor_parallel_size
    kernel.decode_config(config.scheduler_config.max_num_seqs, heads, 8192)


def attempts(given: dict[str, Any], model: str) -> list[dict[str, Any]]:
    """A split with smaller chunks of a prompt until all requests fit, and with whole
    experts on a rank if their parts cannot be built."""

    def attempt(**more: Any) -> dict[str, Any]:
        found.append(forked(lambda: split(given | more, model)))
        return found[-1]

    found: list[dict[str, Any]] = []
    for chunk in JOB["chunks"]:
        last = attempt(max_num_batched_tokens=chunk)
        built = len(last["stages"]) == given["pipeline_parallel_size"]
        if not built or room(last) >= JOB["requests"] or left(last["stages"]) < 0:
            break
    whole = given.get("enable_expert_parallel") or given["tensor_parallel_size"] == 1
    if last.get("configured") and not built and not whole:
        attempt(max_num_batched_tokens=chunk, enable_expert_parallel=True)
    return found


def room(answer: dict[str, Any]) -> int:
    """Requests that fit beside a chunk that is read."""
    if not answer["blocks"]:
        return 0
    read = answer["reading"] - answer["decoding"]
    return int((answer["blocks"] - read) // answer["decoding"])


def main() -> None:
    emulated_xpu.pytest_plugin.prepare()
    # A model's class is looked at here, not in a process that imports vLLM anew.
    registry._run_in_subprocess = lambda look: look()
    folder = JOB["folder"]
    found: list[dict[str, Any]]
    try:
        if JOB["model"]:
            config, known = shapes.published(JOB["model"], Path(folder))
            (Path(folder) / "config.json").write_text(json.dumps(config))
        else:
            known = shapes.listed(folder, JOB["tensors"])
        TENSORS.update(known)
        found = [one for given in JOB["splits"] for one in attempts(given, folder)]
    except shapes.Incomplete as error:
        none = {"refused": str(error), "stages": [], "blocks": 0}
        none["max_num_batched_tokens"] = JOB["chunks"][0]
        found = [given | none for given in JOB["splits"]]
    size = held(TENSORS.values())
    for one in found:
        one["room"] = room(one) * one.get("data_parallel_size", 1)
    Path(sys.argv[2]).write_text(json.dumps({"checkpoint": size, "attempts": found}))


if __name__ == "__main__":
    main()
