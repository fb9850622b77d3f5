# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks share rows of prefill that keep to candidate blocks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout
from helpers.indexer_batch import TOPK, Batch

INDEXER: Any = layout.module("vllm.model_executor.layers.sparse_attn_indexer")
SEQ_LENS, QUERY_LENS = (300, 270, 90, 40), (1, 61, 9, 5)
"""A decode, and prompts whose rows the ranks share."""
SHARED = sum(QUERY_LENS[1:])
BLOCK, BLOCKS, EMPTY = 8, 4, -7


class Rank:
    """One of `ranks` tensor-parallel ranks, with a layer that writes candidate blocks
    and one that reads them.

    Attributes:
        parts: of its own rows, what it gives the others; first of the writing layer.
        scored: how many rows it scored in each layer.
        blocks: candidate blocks of every row, as it has them.
    """

    def __init__(self, rank: int, ranks: int, patch: pytest.MonkeyPatch) -> None:
        self.parts: list[torch.Tensor] = []
        self.scored: list[int] = []
        self.batch = Batch(SEQ_LENS, QUERY_LENS)
        self.batch.builder.tp_size = ranks
        settings = self.batch.config.attention_config
        settings.indexer_tp_shard_min_rows = 2
        rows = sum(QUERY_LENS)
        self.blocks = torch.full((rows, BLOCKS), EMPTY, dtype=torch.int32)
        self.blocks = self.blocks.to(layout.device())
        op = self.batch.indexer.indexer_op
        op.candidate_blocks, op.candidate_block_size = self.blocks, BLOCK
        group = SimpleNamespace(all_gatherv=self._gather, world_size=ranks)
        patch.setattr(INDEXER, "get_tensor_model_parallel_rank", lambda: rank)
        patch.setattr(INDEXER, "get_tp_group", lambda: group)
        self._count(patch)

    def run(self) -> list[torch.Tensor]:
        """What the writing layer chose, and the reading one, for all rows."""
        chosen = []
        for writes in (True, False):
            self.batch.indexer.indexer_op.candidate_write = writes
            chosen.append(self.batch.run().clone())
            # Other queries than those that chose the blocks.
            self.batch.q = self.batch.q.flip(0)
        return chosen

    def _gather(self, part: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        self.parts.append(part.clone())
        return part.new_full((sum(sizes), TOPK), -1)

    def _count(self, patch: pytest.MonkeyPatch) -> None:
        score = torch.ops.vllm.xpu_fp8_mqa_logits

        def counted(q: torch.Tensor, *args: Any) -> torch.Tensor:
            self.scored.append(len(q))
            logits: torch.Tensor = score(q, *args)
            return logits

        patch.setattr(torch.ops.vllm, "xpu_fp8_mqa_logits", counted)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_rank_scores_its_part(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        alone = Rank(0, 1, patch)
        wanted = alone.run()
    members = []
    for number in range(ranks):
        with monkeypatch.context() as patch:
            members.append(Rank(number, ranks, patch))
            members[-1].run()
    scored = sum(sum(member.scored) for member in members)
    assert scored == 2 * SHARED, f"{ranks} ranks score {scored} rows in two layers"
    for layer, whole in enumerate(wanted):
        together = torch.cat([member.parts[layer] for member in members])
        assert torch.equal(together.cpu(), whole[QUERY_LENS[0] :])
    written = torch.cat(
        [member.blocks[(member.blocks != EMPTY).any(1)][1:] for member in members]
    )
    assert torch.equal(written, alone.blocks[QUERY_LENS[0] :])


class Scored(Exception):
    """CUDA's scores were asked for."""


@pytest.mark.unchanged
def test_other_platforms_score_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def score(q: Any, *args: Any) -> None:
        raise Scored(len(q[0]))

    rank = Rank(0, 2, monkeypatch)
    other = layout.another_platform(INDEXER.current_platform)
    monkeypatch.setattr(type(other), "is_cuda", lambda self: True, raising=False)
    monkeypatch.setattr(INDEXER, "current_platform", other)
    monkeypatch.setattr(INDEXER, "mqa_logits_mx_inputs", lambda q, s, w: (s, w))
    monkeypatch.setattr(INDEXER, "fp8_fp4_mqa_logits", score)
    with pytest.raises(Scored, match=f"^{SHARED}$"):
        rank.run()
