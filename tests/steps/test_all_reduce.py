# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks go into the tensor that a layer gives away, without a copy of it."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import model_configs
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import xpu_communicator
from vllm.model_executor.layers.fused_moe.runner import moe_runner
from vllm.model_executor.layers.linear import RowParallelLinear

ROWS, WIDTH = 3, 32


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The addresses of what XPU's communicator adds up over two ranks, of which the
    other one has the same values."""
    addresses: list[int] = []

    def all_reduce(tensor: torch.Tensor, group: Any) -> None:
        addresses.append(tensor.data_ptr())
        tensor.mul_(2)

    monkeypatch.setattr(xpu_communicator.dist, "all_reduce", all_reduce)
    communicator = object.__new__(xpu_communicator.XpuCommunicator)
    communicator.device_group = None
    with model_configs.current(VllmConfig()):
        group = parallel_state.get_tp_group()
        monkeypatch.setattr(group, "world_size", 2)
        monkeypatch.setattr(group, "device_communicator", communicator)
        yield addresses


def projection() -> tuple[RowParallelLinear, list[torch.Tensor]]:
    """The layer of one rank of two, and the products that it makes."""
    layer = RowParallelLinear(WIDTH, WIDTH, bias=False, return_bias=False)
    torch.nn.init.normal_(layer.weight)
    products: list[torch.Tensor] = []
    apply: Callable[..., torch.Tensor] = layer.quant_method.apply

    def kept(*args: Any) -> torch.Tensor:
        products.append(apply(*args))
        return products[-1]

    layer.quant_method.apply = kept
    return layer, products


def final_sum(states: torch.Tensor) -> torch.Tensor:
    """What the experts of one rank of two do last with their output."""
    config = SimpleNamespace(
        skip_final_all_reduce=False, is_sequence_parallel=False, tp_size=2, ep_size=1
    )
    runner = SimpleNamespace(moe_config=config, _fused_output_is_reduced=False)
    reduce: Any = moe_runner.MoERunner._maybe_reduce_final_output
    total: torch.Tensor = reduce(runner, states, None)
    return total


def test_a_projection_gives_its_product_away(summed: list[int]) -> None:
    layer, products = projection()
    x = torch.randn(ROWS, WIDTH // 2)
    total = layer(x)
    assert summed == [products[0].data_ptr()], "a copy was summed"
    torch.testing.assert_close(total, 2 * x @ layer.weight.T)


def test_experts_give_their_output_away(summed: list[int]) -> None:
    states = torch.randn(ROWS, WIDTH)
    expected = 2 * states
    assert torch.equal(final_sum(states), expected)
    assert summed == [states.data_ptr()], "a copy was summed"


@pytest.mark.unchanged
def test_others_keep_their_tensor(summed: list[int]) -> None:
    kept = torch.randn(ROWS, WIDTH)
    before = kept.clone()
    total = parallel_state.get_tp_group().all_reduce(kept)
    assert torch.equal(kept, before) and torch.equal(total, 2 * before)


@pytest.mark.unchanged
def test_parts_of_a_tensor_are_copied(summed: list[int]) -> None:
    """What a collective takes must be one piece."""
    states = torch.randn(ROWS, 2 * WIDTH)[:, :WIDTH]
    expected = 2 * states
    assert torch.equal(final_sum(states), expected)
    assert summed != [states.data_ptr()]


@pytest.mark.unchanged
def test_batch_invariant_sums_keep_the_order_of_the_ranks(
    summed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are gathered, then added one after another."""

    def gather(output: torch.Tensor, tensor: torch.Tensor, group: Any) -> None:
        output.view(2, -1).copy_(torch.stack((tensor, 4 * tensor)))

    for name in ("all_gather_single", "all_gather_into_tensor"):
        monkeypatch.setattr(xpu_communicator.dist, name, gather, raising=False)
    monkeypatch.setattr(xpu_communicator.envs, "VLLM_BATCH_INVARIANT", True)
    communicator = parallel_state.get_tp_group().device_communicator
    monkeypatch.setattr(communicator, "world_size", 2, raising=False)
    states = torch.randn(ROWS, WIDTH)
    before = states.clone()
    assert torch.equal(final_sum(states), before + 4 * before)
    assert torch.equal(states, before) and not summed


@pytest.mark.unchanged
def test_one_rank_sums_nothing(
    summed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with experts over ranks of which each has all heads."""
    monkeypatch.setattr(parallel_state.get_tp_group(), "world_size", 1)
    states = torch.randn(ROWS, WIDTH)
    before = states.clone()
    assert torch.equal(final_sum(states), before) and not summed


@pytest.mark.unchanged
def test_compiled_code_keeps_its_tensor(
    summed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A custom op must not return its input."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    states = torch.randn(ROWS, WIDTH)
    before = states.clone()
    assert torch.equal(final_sum(states), 2 * before)
    assert torch.equal(states, before) and summed != [states.data_ptr()]


@pytest.mark.unchanged
def test_communicators_of_other_platforms_are_asked_as_before(
    summed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.Tensor] = []

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        asked.append(x)
        return 2 * x

    other = SimpleNamespace(all_reduce=all_reduce)
    group = parallel_state.get_tp_group()
    monkeypatch.setattr(group, "device_communicator", other)
    states = torch.randn(ROWS, WIDTH)
    assert torch.equal(final_sum(states), 2 * states)
    assert len(asked) == 1 and not summed
