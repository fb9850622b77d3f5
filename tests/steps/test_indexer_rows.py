# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks share the rows of prefill that the indexer scores."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout, model_configs
from helpers.indexer_batch import TOPK, Batch, Given
from vllm.config import VllmConfig
from vllm.distributed.device_communicators import xpu_communicator

INDEXER: Any = layout.module("vllm.model_executor.layers.sparse_attn_indexer")
BACKEND: Any = layout.module(layout.INDEXER_BACKEND)
SEQ_LENS, QUERY_LENS = (300, 270, 90, 40), (1, 61, 9, 5)
"""A decode, and prompts whose rows the ranks share."""
OPS = {False: "xpu_fp8_mqa_logits", True: "mxfp4_mqa_logits"}


def rank_of(
    ranks: int,
    rank: int,
    fp4: bool,
    gather: Callable[..., torch.Tensor],
    patch: pytest.MonkeyPatch,
    least_rows: int = 2,
) -> tuple[Batch, list[int], list[int]]:
    """The batch as one of `ranks` runs it, how many rows it scores, and how many it
    projects; `gather` has the part in its hands. A user has the ranks share rows from
    `least_rows` on."""
    batch = Batch(SEQ_LENS, QUERY_LENS, fp4=fp4)
    batch.builder.tp_size = ranks
    batch.config.attention_config.indexer_tp_shard_min_rows = least_rows
    scored: list[int] = []
    place: Any = INDEXER if fp4 else torch.ops.vllm
    op = getattr(place, OPS[fp4])

    def score(q: torch.Tensor, *args: Any) -> torch.Tensor:
        scored.append(len(q))
        logits: torch.Tensor = op(q, *args)
        return logits

    projected: list[int] = []
    project = Given.forward

    def counted(self: Given, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        projected.append(len(x))
        return project(self, x)

    patch.setattr(Given, "forward", counted)
    patch.setattr(place, OPS[fp4], score)
    patch.setattr(INDEXER, "get_tensor_model_parallel_rank", lambda: rank)
    group = SimpleNamespace(all_gatherv=gather, world_size=ranks)
    patch.setattr(INDEXER, "get_tp_group", lambda: group)

    def whole(_: torch.nn.Module, given: tuple[Any, ...]) -> None:
        assert len(given[3]) == sum(QUERY_LENS), "a row for each token"

    batch.indexer.indexer_op.register_forward_pre_hook(whole)
    return batch, scored, projected


def nothing_of_others(part: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
    """A gather that leaves other ranks' rows without entries."""
    return part.new_full((sum(sizes), TOPK), -1)


@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "mxfp4"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_rank_scores_its_part(
    ranks: int, fp4: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[torch.Tensor] = []
    rows = queries = 0

    def keep(part: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        parts.append(part.clone())
        return nothing_of_others(part, dim, sizes)

    for rank in range(ranks):
        with monkeypatch.context() as patch:
            batch, scored, projected = rank_of(ranks, rank, fp4, keep, patch)
            batch.run()
            rows, queries = rows + sum(scored), queries + sum(projected)
    shared = sum(QUERY_LENS[1:])
    assert rows == shared, f"{ranks} ranks score {rows} rows"
    assert queries == shared + ranks, f"{ranks} ranks project {queries} rows"

    def gather(part: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        assert [len(one) for one in parts] == sizes
        return torch.cat(parts)

    batch, _, _ = rank_of(ranks, 0, fp4, gather, monkeypatch)
    batch.check()


def test_a_graph_has_the_queries_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is captured, no part of the rows is baked into it."""
    batch, scored, projected = rank_of(2, 0, False, nothing_of_others, monkeypatch)
    monkeypatch.setattr(torch.xpu, "is_current_stream_capturing", lambda: True)
    batch.run()
    assert sum(scored) < sum(QUERY_LENS[1:]), f"2 ranks score {sum(scored)} rows"
    assert projected == [sum(QUERY_LENS)]


@pytest.mark.unchanged
def test_every_rank_scores_fewer_rows_than_a_user_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, scored, projected = rank_of(
        2, 0, False, nothing_of_others, monkeypatch, least_rows=1 + sum(QUERY_LENS[1:])
    )
    batch.check()
    assert sum(scored) == sum(QUERY_LENS[1:])
    assert projected == [sum(QUERY_LENS)]


@pytest.mark.unchanged
def test_other_platforms_project_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where their ranks share the scores."""
    batch, _, projected = rank_of(2, 0, False, nothing_of_others, monkeypatch)
    module = layout.module("vllm.models.deepseek_v4.attention")
    other = layout.another_platform(module.current_platform)
    monkeypatch.setattr(module, "current_platform", other)
    batch.run()
    assert projected == [sum(QUERY_LENS)]


@pytest.mark.parametrize("sizes", [[3, 1, 4], [2, 2, 2]], ids=str)
def test_they_are_gathered_where_they_belong(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts go into the result itself, whatever their lengths."""
    addresses: list[list[int]] = []

    def all_gather(parts: list[torch.Tensor], part: torch.Tensor, group: Any) -> None:
        addresses.append([one.data_ptr() for one in parts])
        for rank, one in enumerate(parts):
            one.fill_(rank)

    def all_gather_single(whole: torch.Tensor, part: torch.Tensor, group: Any) -> None:
        all_gather(list(whole.split(len(part))), part, group)

    monkeypatch.setattr(xpu_communicator.dist, "all_gather", all_gather)
    monkeypatch.setattr(xpu_communicator.dist, "all_gather_single", all_gather_single)
    communicator: Any = object.__new__(xpu_communicator.XpuCommunicator)
    communicator.device_group, communicator.rank_in_group = None, 1
    communicator.world_size = len(sizes)
    part = torch.zeros(sizes[1], TOPK, dtype=torch.int32)
    whole = communicator.all_gatherv(part, sizes=sizes)
    starts = [one.data_ptr() for one in whole.split(sizes)]
    assert addresses == [starts], "the parts were copied"
    ranks = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    assert whole[:, 0].tolist() == ranks


@pytest.mark.parametrize(
    "refused",
    [{"tp_size": 1}, {"dcp_world_size": 2}, {"use_pcp": True}, {"invariant": True}],
    ids=str,
)
def test_where_every_rank_scores_all(
    refused: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"dcp_world_size": 1, "use_pcp": False, "tp_size": 2}
    supported = BACKEND.tp_prefill_row_sharding_supported
    with model_configs.current(config := VllmConfig()):
        assert supported(config, **arguments), "every rank scores all rows"
        if refused.pop("invariant", False):
            monkeypatch.setattr(BACKEND.envs, "VLLM_BATCH_INVARIANT", True)
        assert not supported(config, **(arguments | refused))


@pytest.mark.unchanged
@pytest.mark.parametrize("switch", ["VLLM_DISABLE_PYNCCL", "VLLM_USE_NCCL_SYMM_MEM"])
def test_cuda_asks_for_its_own_communicator(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"dcp_world_size": 1, "use_pcp": False, "tp_size": 2}
    supported = BACKEND.tp_prefill_row_sharding_supported
    config = VllmConfig()
    other = layout.another_platform(BACKEND.current_platform)
    monkeypatch.setattr(BACKEND, "current_platform", other)
    monkeypatch.setattr(type(other), "is_cuda", lambda self: False, raising=False)
    assert not supported(config, **arguments)
    monkeypatch.setattr(type(other), "is_cuda", lambda self: True)
    monkeypatch.setattr(BACKEND.envs, switch, False)
    assert supported(config, **arguments)
    monkeypatch.setattr(BACKEND.envs, switch, True)
    assert not supported(config, **arguments)
