# SPDX-License-Identifier: Apache-2.0
"""Experts in host memory, with slots for some of them on the device."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from helpers import layout, model_configs, moe_layers, v41
from helpers.cached_experts import (
    EXPERT_BYTES,
    EXPERTS,
    FIRST,
    HIDDEN,
    INTER,
    LATER,
    LAYERS,
    PAGE,
    TOKENS,
    TOPK,
    Executor,
    Host,
    build,
    cache_of,
    current_config,
    load,
    loaded,
    method,
    outputs,
    take_slots,
)

OWN = f"{layout.FUSED_MOE}.expert_cache"


@pytest.fixture
def config() -> Iterator[Any]:
    with current_config() as made:
        yield made


@pytest.mark.parametrize("slots", [TOPK, 4, EXPERTS + 1])
def test_bits_are_those_of_experts_on_the_device(slots: int, config: Any) -> None:
    """With two slots a step of five tokens is served in waves."""
    resident = method(moe_backend="triton")
    layer = build(resident)
    load(resident, layer)
    wanted = outputs(resident, layer)
    take_slots(config, slots)
    cached, layer = loaded()
    for mine, theirs in zip(outputs(cached, layer), wanted, strict=True):
        assert torch.equal(mine, theirs)
    experts = cached.moe_kernel.fused_experts
    cache = experts.cache
    assert len(cache.expert_of) == min(slots, EXPERTS)
    kernel = layout.module("vllm.model_executor.kernels.xpu_dsv4.moe.expert_cache")
    sizes = TOKENS, TOPK, EXPERTS, min(slots, EXPERTS), HIDDEN, INTER
    elements = (kernel.cached_workspace_size(*sizes) + 1) // 2
    given = TOKENS, 2 * INTER, HIDDEN, TOPK, EXPERTS, EXPERTS, None, None
    wanted_shapes = (elements,), (0,), (TOKENS, HIDDEN)
    assert experts.workspace_shapes(*given) == wanted_shapes
    assert cache.host[0].data_ptr() == layer.w13_weight.data_ptr()
    hits, misses = cache.counts[1:3].tolist()
    assert misses == EXPERTS if slots > EXPERTS else misses > EXPERTS - 1
    assert hits or slots == TOPK


def test_a_layer_has_all_its_experts(config: Any) -> None:
    """What a start refuses no layer does: a step reads experts by their own numbers."""
    take_slots(config, TOPK)
    made, layer = loaded()
    layer.expert_map = torch.arange(EXPERTS)
    with pytest.raises(AssertionError):
        outputs(made, layer)


def test_what_is_taken_is_printed_once(
    config: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(layout.module(OWN), "GiB_bytes", 1)
    take_slots(config, 3)
    said = []
    with caplog.at_level(logging.INFO):
        for name in (FIRST, LATER):
            loaded(name)
            said.append([line for line in caplog.messages if line[:7] == "Experts"])
    lines = said[0]
    assert len(lines) == 2 and said[1] == lines, said
    assert "GiB of pinned memory of this host" in lines[0]
    taken = 3 * LAYERS * EXPERT_BYTES
    assert f"Experts on the device: 3 of 6 a layer, {taken}.00 GiB" in lines[1]


def test_fewer_slots_than_a_token_s_experts(config: Any) -> None:
    take_slots(config, TOPK - 1)
    with pytest.raises(ValueError, match=f"{TOPK} is the least that works"):
        build(method())


@pytest.mark.parametrize(
    ("name", "span", "layers"),
    [(FIRST, (0, LAYERS), LAYERS), (LATER, (0, LAYERS), 1), (LATER, (1, 4), 3)],
    ids=["first", "later", "first of a later stage"],
)
def test_a_host_that_is_too_small(
    name: str,
    span: tuple[int, int],
    layers: int,
    config: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first layer counts all of them, in the powers of two that torch pins."""
    config.model_config.get_layers_start_end_indices = lambda parallel: span
    take_slots(config, TOPK)
    own = layout.module(OWN)
    monkeypatch.setattr(own, "GiB_bytes", 1)
    parts = (INTER * HIDDEN, 2 * INTER * HIDDEN // 32)
    sizes = (*(EXPERTS * n for n in parts), *(EXPERTS * n // 2 for n in parts))
    need = layers * sum(1 << (size - 1).bit_length() for size in sizes)
    monkeypatch.setattr(own, "free_host_memory", lambda: need - 9)
    with pytest.raises(ValueError, match=r"9\.00 GiB are missing") as error:
        build(method(), name)
    assert name in str(error.value) and f"need {need}.00" in str(error.value)
    monkeypatch.setattr(own, "free_host_memory", lambda: need)
    build(method(), name)


def test_ranks_of_the_host_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    own = layout.module(OWN)
    group = SimpleNamespace(world_size=3, cpu_group=None)
    monkeypatch.setattr(own, "get_world_group", lambda: group)

    def gather(found: list[Any], mine: tuple[str, int], group: Any) -> None:
        found[:] = [mine, ("another host", 7), (mine[0], 8)]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    assert own._of_this_host(5) == 13


def test_memory_that_is_not_pinned_is_named(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_slots(config, TOPK)
    made = method()

    def refuse(*_: object, **options: object) -> None:
        assert options["pin_memory"] and options["device"] == "cpu"
        raise RuntimeError("out of host memory")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(RuntimeError, match=f"did not pin {EXPERTS * HIDDEN * INTER}"):
        build(made)


@pytest.mark.parametrize(
    ("size", "requests", "room", "slots"),
    [
        *((2, 1, 3, 3), (2, 1, 2, 3), (2, 1, 1, 2), (2, 1, 0, 2)),
        *((2, 3, 3, 3), (2, 3, 2, 3), (2, 1, 99, 6), (2, 99, 2, 2), (1, 1, 3, 5)),
    ],
)
def test_experts_take_what_the_cache_of_all_requests_leaves(
    size: int,
    requests: int,
    room: int,
    slots: int,
    config: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`room` experts of one layer beside the cache; `size` layers share it, on as many
    workers, of which the second has more. A request decodes with 8 blocks and 2, and
    reads a chunk of its prompt with 3 more."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    take_slots(config, -1)
    config.scheduler_config.max_num_seqs = requests
    layers = [loaded(name) for name in (FIRST, LATER)[:size]]
    caches = [made.moe_kernel.fused_experts for made, _ in layers]
    assert [len(one.cache.expert_of) for one in caches] == [TOPK] * size
    assert [one.most_slots for one in caches] == [EXPERTS] * size
    blocks = 1 + 10 * min(requests, 9) + 3
    memory = blocks * PAGE + room * EXPERT_BYTES
    available = [memory, memory + PAGE][:size]
    own, freed = layout.module(OWN), []
    monkeypatch.setattr(
        torch.accelerator,
        "empty_cache",
        lambda: freed.append(any(hasattr(one, "cache") for one in caches)),
    )
    with caplog.at_level(logging.INFO):
        left = own.fill_expert_cache(
            Executor(config, layers),
            config,
            [cache_of(memory // PAGE)] * size,
            available,
        )
    taken = (slots - TOPK) * size * EXPERT_BYTES
    assert left == [bytes_ - taken for bytes_ in available]
    assert [len(one.cache.expert_of) for one in caches] == [slots] * size
    assert f"Experts on the device: {slots} of {EXPERTS} a layer" in caplog.text
    assert ("lower them" in caplog.text) == (slots == TOPK)
    assert freed == [False] * (size * (slots > TOPK)), (
        "slots were there beside new ones"
    )
    assert own.expert_cache_size() == (slots if slots > TOPK else -1)
    outputs(*layers[0])


class Ready(Exception):
    """An engine knows the caches of its workers."""


@pytest.mark.parametrize("slots", [-1, pytest.param(0, marks=pytest.mark.unchanged)])
def test_the_cache_gets_what_experts_leave(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, given = layout.module("vllm.v1.engine.core"), []

    def configs(config: Any, specs: Any, memory: Any, *more: Any) -> list[Any]:
        given.append(memory)
        return [MagicMock()]

    monkeypatch.setattr(core, "get_kv_cache_configs", configs)
    ready = MagicMock(side_effect=Ready)
    monkeypatch.setattr(core, "generate_scheduler_kv_cache_config", ready)
    for name in ("resolve_kv_cache_layout", "get_global_kv_cache_groups"):
        monkeypatch.setattr(core, name, MagicMock(), raising=False)
    if slots:
        fill = MagicMock(return_value=[7])
        monkeypatch.setattr(layout.module(OWN), "fill_expert_cache", fill)
    config, engine = MagicMock(), core.EngineCore.__new__(core.EngineCore)
    config.offload_config.moe_expert_cache_size = slots
    engine.model_executor = MagicMock()
    engine.model_executor.get_kv_cache_specs.return_value = [{"layer": None}]
    engine.model_executor.determine_available_memory.return_value = [100]
    with pytest.raises(Ready):
        engine._initialize_kv_caches(config)
    assert given == ([[100], [7]] if slots else [[100]])


def test_room_is_measured_or_given(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = layout.module(OWN)
    take_slots(config, -1)
    config.model_config.enable_sleep_mode = False
    own.check_expert_cache(config)
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "1")
    with pytest.raises(ValueError, match="or VLLM_ENABLE_STARTUP_PLAN: drop"):
        own.check_expert_cache(config)
    monkeypatch.delenv("VLLM_ENABLE_STARTUP_PLAN")
    config.cache_config.kv_cache_memory_bytes = 1 << 30
    with pytest.raises(ValueError, match="nobody measures with --kv-cache-memory-"):
        own.check_expert_cache(config)
    for slots in (0, TOPK):
        take_slots(config, slots)
        own.check_expert_cache(config)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"enable_expert_parallel": True}, "--enable-expert-parallel"),
        ({"data_parallel_size": 2}, "--data-parallel-size"),
        ({"enable_sleep_mode": True}, "--enable-sleep-mode"),
        ({"weight_transfer_config": "nccl"}, "--weight-transfer-config"),
        ({}, None),
    ],
)
def test_what_does_not_work_beside(
    change: dict[str, Any], flag: str | None, config: Any
) -> None:
    take_slots(config, TOPK)
    names = ("enable_eplb", "enable_expert_parallel", "enable_sleep_mode")
    given = SimpleNamespace(
        **{"data_parallel_size": 1, **dict.fromkeys(names, False)} | change
    )
    check = layout.module(OWN).check_expert_cache
    whole = SimpleNamespace(
        parallel_config=given,
        model_config=given,
        offload_config=config.offload_config,
        weight_transfer_config=change.get("weight_transfer_config"),
    )
    if flag is None:
        check(whole)
        whole.model_config = None
        check(whole)
        return
    with pytest.raises(ValueError, match=f"not work with {flag}: drop one"):
        check(whole)


def test_a_start_asks_what_does_not_work(tmp_path: Path) -> None:
    options = {"moe_expert_cache_size": TOPK, "enable_expert_parallel": True}
    with pytest.raises((TypeError, ValueError), match="--enable-expert-parallel"):
        v41.configured(tmp_path, **options)


@pytest.mark.parametrize("slots", [-1, TOPK, 0])
def test_a_running_server_loads_no_other_weights(slots: int, config: Any) -> None:
    take_slots(config, slots)
    worker = layout.module("vllm.v1.worker.gpu_worker").Worker
    loaded: list[str] = []
    runner = SimpleNamespace(reload_weights=lambda **given: loaded.append(*given))
    own = SimpleNamespace(vllm_config=config, model_runner=runner)
    if slots:
        with pytest.raises(NotImplementedError, match="Start the server again"):
            worker.reload_weights(own, weights_path="other")
    else:
        worker.reload_weights(own, weights_path="other")
    assert loaded == ["weights_path"] * (not slots)


@pytest.mark.parametrize("beside", ["backend", "uva", "prefetch"])
def test_one_place_of_experts(beside: str) -> None:
    from vllm.config import OffloadConfig
    from vllm.config.offload import PrefetchOffloadConfig, UVAOffloadConfig

    given: dict[str, Any] = {
        "backend": {"offload_backend": "uva"},
        "uva": {"uva": UVAOffloadConfig(cpu_offload_gb=1)},
        "prefetch": {"prefetch": PrefetchOffloadConfig(offload_group_size=1)},
    }[beside]
    with pytest.raises(ValueError, match="moe_expert_cache_size already keeps"):
        OffloadConfig(moe_expert_cache_size=8, **given)
    OffloadConfig(**given)


def test_how_many_may_be_asked_for() -> None:
    from vllm.config import OffloadConfig

    with pytest.raises(ValueError, match="greater than or equal to -1"):
        OffloadConfig(moe_expert_cache_size=-2)
    assert layout.module(OWN).expert_cache_size() == 0


@pytest.mark.parametrize(("given", "slots"), [("auto", -1), ("27", 27)])
def test_the_command_line_takes_it(given: str, slots: int) -> None:
    from vllm.config import OffloadConfig
    from vllm.engine.arg_utils import get_kwargs

    kwargs = get_kwargs(OffloadConfig)
    assert "moe_expert_cache_size" in kwargs
    assert kwargs["moe_expert_cache_size"]["type"](given) == slots
    arguments = layout.module("vllm.engine.arg_utils").EngineArgs
    parser = layout.module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    words = ["--moe-expert-cache-size", given]
    parsed = arguments.add_cli_args(parser).parse_args(words)
    assert parsed.moe_expert_cache_size == slots


def test_other_experts_are_refused(config: Any) -> None:
    """Unless they are MXFP4's in Triton."""
    take_slots(config, TOPK)
    base = layout.module(f"{layout.FUSED_MOE}.fused_moe_method_base")
    unquantized = layout.module(f"{layout.FUSED_MOE}.unquantized_fused_moe_method")
    kinds = (base.FusedMoEMethodBase, unquantized.UnquantizedFusedMoEMethod)
    assert all(not kind.supports_expert_cache.fget(None) for kind in kinds)
    assert method().supports_expert_cache
    assert not method(moe_backend="xpu").supports_expert_cache
    with pytest.raises(NotImplementedError, match="UnquantizedFusedMoEMethod"):
        moe_layers.experts(config)
    moe_layers.experts(model_configs.vllm_config())
    take_slots(config, -1)
    config.quant_config = model_configs.vllm_config(quantized=True).quant_config
    moe_layers.experts(config)


def test_processing_leaves_them_on_the_host(config: Any) -> None:
    """Other parameters on the host are moved to the device meanwhile."""
    take_slots(config, TOPK)
    layer = build(method())
    addresses = [part.data_ptr() for part in layer.parameters()]
    context = layout.module("vllm.model_executor.model_loader.utils")
    with context.device_loading_context(layer, torch.device("meta")):
        assert not any(part.is_meta for part in layer.parameters())
    assert [part.data_ptr() for part in layer.parameters()] == addresses


@pytest.mark.unchanged
def test_other_platforms_move_parameters_as_before() -> None:
    """Parameters on the host go to the device while they are processed, and back."""
    values, meta = Host(), torch.device("meta")
    part = SimpleNamespace(device=torch.device("cpu"), data=values)
    there = SimpleNamespace(device=meta, data=Host())
    parts = {"weight": part, "scale": there}
    module = SimpleNamespace(named_parameters=parts.items)
    context = layout.module("vllm.model_executor.model_loader.utils")
    with context.device_loading_context(module, meta):
        assert values.moved == [meta] and not there.data.moved
        on_device = part.data
    assert torch.equal(part.data, on_device) and part.data is not on_device
