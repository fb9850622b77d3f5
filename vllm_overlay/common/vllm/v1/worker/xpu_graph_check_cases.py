# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Batches that come to each captured graph, with inputs that no capture saw."""

from typing import Any, NamedTuple

import torch

from vllm.config import CUDAGraphMode
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.worker.xpu_graph_check_twins import EagerDrafts

logger = init_logger(__name__)

# Tokens in the cache before the step, by turns. The long ones end a page, and an
# entry of each compressed cache. The first request has more, so that indexers choose.
CONTEXTS = (255, 3, 4, 5, 6, 7, 8, 9, 127, 10, 11, 12, 13, 14, 15, 16)
PAGE = 256
# From this ratio on, layers read all entries of their compressed cache.
ALL_ENTRIES_RATIO = 128
# Plain text in every vocabulary: special tokens and those of images lie elsewhere.
MAX_TOKEN_ID = 1000


class CachedRequest(NamedTuple):
    """A request whose first tokens are in the cache, with room for the next ones."""

    req_id: str
    token_ids: list[int]
    block_ids: tuple[list[int], ...]


class Case(NamedTuple):
    """A captured graph, and a batch that is replayed by it. `drafts` tells whether the
    drafts that follow are compared; in mode NONE they alone come to a graph."""

    mode: CUDAGraphMode
    graph_tokens: int
    requests: list[CachedRequest]
    num_new_tokens: int
    inputs: str
    drafts: bool = False

    def __str__(self) -> str:
        if self.mode == CUDAGraphMode.NONE:
            return f"graph of drafts for {len(self.requests)} requests"
        return f"{self.mode.name} graph of {self.graph_tokens} tokens ({self.inputs})"


class Cases:
    """Builds the cases of one model runner, of either version."""

    def __init__(self, runner: Any, drafts: EagerDrafts) -> None:
        self.runner = runner
        self.drafts = drafts
        self.kv_cache_config = runner.kv_cache_config
        self.next_block = 1  # Block 0 is the null block.

    def build(self) -> tuple[list[CachedRequest], list[Case]]:
        """The requests whose contexts must come to the cache, and two batches for each
        size of decode graphs, one for each other size of drafts, and a prompt for each
        other size."""
        if (manager := getattr(self.runner, "cudagraph_manager", None)) is not None:
            descs = manager._capture_descs
        else:
            descs = dict(self.runner.cudagraph_dispatcher.get_capture_descs())
        full, prompts = (
            sorted(
                (d for d in descs.get(mode, ()) if d.num_active_loras == 0),
                key=lambda d: d.num_tokens,
            )
            for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
        )
        full = [d for d in full if d.num_tokens % d.num_reqs == 0]
        counts = {d.num_reqs for _, d in self.drafts.descs(CUDAGraphMode.FULL)}
        drafts = num_draft_tokens(self.runner)
        most = max((d.num_tokens // d.num_reqs for d in full), default=drafts + 1)
        count = max({*counts, *(d.num_reqs for d in full)}, default=0)
        pool = self._requests(count, most + drafts)
        cases, previous = [], 0
        for desc in full:
            new = desc.num_tokens // desc.num_reqs
            batches = {
                "as many requests": pool[: desc.num_reqs],
                "fewer requests, other inputs": pool[::-1][: previous + 1],
            }
            if desc.num_reqs > len(pool):
                logger.warning("Too few blocks to check %d requests", desc.num_reqs)
                break
            cases += [
                Case(CUDAGraphMode.FULL, desc.num_tokens, requests, new, inputs)
                for inputs, requests in batches.items()
            ]
            previous = desc.num_reqs
        # Stages without drafts have the same cases up to the last ones.
        more = self._of_drafts(cases, counts, pool, most)
        return pool, [*cases, *self._prompts([d.num_tokens for d in prompts]), *more]

    def _of_drafts(
        self, cases: list[Case], counts: set[int], pool: list[CachedRequest], new: int
    ) -> list[Case]:
        """Compare drafts in one case for each number of requests that fills a graph of
        theirs, as logits of fewer rows may be rounded in another way. Returns the
        cases that are missing for that."""
        for i, case in enumerate(cases):
            count = len(case.requests)
            if count in counts and case.num_new_tokens == new:
                counts = counts - {count}
                cases[i] = case._replace(drafts=True)
        more = []
        for count in sorted(n for n in counts if n <= len(pool)):
            graph = next((c for c in cases if c.graph_tokens >= count * new), None)
            mode = graph.mode if graph else CUDAGraphMode.NONE
            size = graph.graph_tokens if graph else count * new
            more.append(Case(mode, size, pool[:count], new, "requests of drafts", True))
        return more

    def _prompts(self, sizes: list[int]) -> list[Case]:
        """A prompt for each graph in pieces."""
        compared = bool(self.drafts.descs(CUDAGraphMode.PIECEWISE))
        room = num_draft_tokens(self.runner)
        sizes = [size for size in sizes if size < self.runner.max_model_len - room]
        if not sizes or not (blocks := self._allocate(max(sizes) + room)):
            return []
        prompt = [CachedRequest("_graph_check_prompt", [], blocks)]
        mode = CUDAGraphMode.PIECEWISE
        return [Case(mode, size, prompt, size, "a prompt", compared) for size in sizes]

    def _requests(self, count: int, room: int) -> list[CachedRequest]:
        """Requests with `room` tokens behind the context, as many as find blocks."""
        limit = self.runner.max_model_len - room - 1
        requests: list[CachedRequest] = []
        for i in range(count):
            context = CONTEXTS[i % len(CONTEXTS)] if i else self._choosing_context()
            context = min(context, limit)
            blocks = self._allocate(context + room)
            if blocks is None:
                break
            tokens = random_tokens(self.runner, context, seed=i)
            requests.append(CachedRequest(f"_graph_check_{i}", tokens, blocks))
        return requests

    def _choosing_context(self) -> int:
        """A context half as long again as what indexers give whole; it ends a page."""
        config = self.runner.model_config.hf_text_config
        ratios = getattr(config, "compress_ratios", None)
        if ratios is None:
            ratios = config.compress_rates.values()
        ratio = max((r for r in ratios if r < ALL_ENTRIES_RATIO), default=0)
        return cdiv(config.index_topk * ratio * 3 // 2, PAGE) * PAGE - 1

    def _allocate(self, num_tokens: int) -> tuple[list[int], ...] | None:
        """Blocks of each group that no other request of the check has."""
        blocks = []
        first = self.next_block
        for group in self.kv_cache_config.kv_cache_groups:
            # A ring of compressor state is one block, whatever the length.
            spec, config = group.kv_cache_spec, self.runner.vllm_config
            count = spec.max_num_blocks_per_req(config, num_tokens)
            blocks.append(list(range(first, first + count)))
            first += count
        if first > self.kv_cache_config.num_blocks:
            return None
        self.next_block = first
        return tuple(blocks)


def num_draft_tokens(runner: Any) -> int:
    """How many tokens a request's drafts have, on every pipeline stage."""
    config = runner.vllm_config.speculative_config
    return 0 if config is None else config.num_speculative_tokens


def random_tokens(runner: Any, count: int, seed: int) -> list[int]:
    size = min(MAX_TOKEN_ID, runner.model_config.get_vocab_size())
    random = torch.Generator().manual_seed(seed)
    return torch.randint(size, (count,), generator=random).tolist()
