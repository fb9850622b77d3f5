# SPDX-License-Identifier: Apache-2.0
"""Speculators whose graphs stand in for captured ones, as in `captured_graphs`.

A draft has one layer with a cache of its own. Its rows are rounded by the padding and
by the longest context of the metadata, its tokens by the number of rows that logits are
computed of, so that a twin of other shapes is another one.
"""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CUDAGraphMode

from .captured_graphs import (
    BLOCK,
    BLOCKS,
    LAYERS,
    LONGEST,
    OTHER_ORDER,
    SIZES,
    VOCABULARY,
    WIDTH,
    Batch,
    Manager,
)

STEPS, MOST = 2, 8
"""Tokens of a request's drafts, and the most requests."""
LAYER = f"model.layers.{LAYERS}.attn"
"""The draft's, after the model's."""


class DraftManager(Manager):
    """Replays a speculator's function with what was there at the capture."""

    def __init__(self, sizes: tuple[int, ...], new: int) -> None:
        super().__init__(sizes, new)
        self.replayed: list[int] = []

    def capture(self, function: Any, state: tuple[torch.Tensor, ...]) -> None:
        self.function, self.state = function, state

    def run_fullgraph(self, desc: Any) -> None:
        assert desc in self.graphs
        self.replayed.append(desc.num_reqs)
        self.function(self.state, desc.num_reqs, desc.num_tokens, LONGEST)


class Speculator:
    """What both kinds have: a layer, its cache, and buffers that graphs read."""

    new = STEPS + 1
    num_speculative_steps = STEPS
    max_model_len = LONGEST
    draft_max_seq_len: int
    width: int
    """Tokens of a request in a graph of `_generate_draft`."""

    def __init__(self, runner: Any) -> None:
        self.weight, self.head = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, 64)
        self.embedding = torch.randn(VOCABULARY, WIDTH)
        self.cache = torch.zeros(BLOCKS, BLOCK, WIDTH)
        self.hidden_states = torch.zeros(MOST * self.new, WIDTH)
        self.draft_tokens = torch.zeros(MOST, STEPS, dtype=torch.long)
        self.tokens = torch.zeros(MOST, dtype=torch.long)
        self.places: list[tuple[int, Any]] = []
        self.rejected: set[int] = set()
        self.sampled: set[int] = set()
        runner.vllm_config.speculative_config = SimpleNamespace(
            num_speculative_tokens=STEPS
        )
        layers = runner.vllm_config.compilation_config.static_forward_context
        layers[LAYER] = SimpleNamespace(kv_cache=self.cache)
        runner.kv_cache_config.kv_cache_groups[0].layer_names.append(LAYER)
        states = SimpleNamespace(gpu=torch.zeros(MOST))
        sampling = SimpleNamespace(temperature=states, seeds=states)
        runner.sampler = SimpleNamespace(sampling_states=sampling)
        runner.req_states = SimpleNamespace(
            last_sampled_tokens=torch.zeros(MOST, 1, dtype=torch.long),
            next_prefill_tokens=torch.zeros(1, MOST, dtype=torch.long),
        )
        runner._draft_workspace_lane = 0
        runner.model = SimpleNamespace()

    def begin(
        self, batch: Batch, hidden: torch.Tensor, rejected: Any, sampled: Any
    ) -> None:
        """Fill the buffers by each request's last token that is not rejected."""
        ends = torch.tensor(batch.counts).cumsum(0)
        last = (ends - 1 - rejected).tolist()
        count = batch.num_reqs
        self.hidden_states[:count] = hidden[last]
        self.tokens[:count] = sampled[batch.idx_mapping, 0]
        self.places = [batch.rows[i][1:] for i in last]
        self.draft_max_seq_len = max(position for position, _ in self.places) + STEPS

    def compute(
        self,
        state: tuple[torch.Tensor, ...],
        num_reqs: int,
        padded: int,
        longest: int,
        step: int,
    ) -> None:
        """One token of each request's drafts, and the places of the next."""
        weight, head = state
        count = len(self.places)
        seen = []
        rows = self.hidden_states[:count]
        for row, (position, blocks) in zip(rows, self.places, strict=True):
            pages = self.cache[torch.tensor(blocks[0])].flatten(0, 1)
            pages[position] = row
            self.cache[torch.tensor(blocks[0])] = pages.view(-1, BLOCK, WIDTH)
            seen.append(pages[: position + 1].mean(0))
        x = rows + self.embedding[self.tokens[:count]]
        x = torch.tanh((x + torch.stack(seen)) @ weight)
        x[:, 0] *= 1 + OTHER_ORDER * (padded / 8 + longest / LONGEST)
        self.hidden_states[:count] = x
        chosen = ((x @ head).argmax(1) + num_reqs) % VOCABULARY
        self.draft_tokens[:count, step] = self.tokens[:count] = chosen
        self.places = [(position + 1, blocks) for position, blocks in self.places]

    def propose(
        self,
        batch: Batch,
        attn_metadata: int,
        slot_mappings: Any,
        hidden: torch.Tensor,
        aux_hidden: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *given: Any,
        dp_sync_state: Any,
    ) -> torch.Tensor:
        self.begin(batch, hidden, num_rejected, last_sampled)
        self.rejected |= {*num_rejected.tolist()}
        self.sampled |= {*last_sampled.flatten().tolist()}
        self.draft(batch, attn_metadata)
        return self.draft_tokens[: batch.num_reqs]

    def draft(self, batch: Batch, longest: int) -> None:
        raise NotImplementedError

    def generate(self, manager: DraftManager, count: int) -> None:
        """`_generate_draft` by a graph, if there is one, with metadata of its own."""
        desc = manager.dispatch(count, count * self.width)
        longest = self._build_attn_metadata(num_reqs=count, batch_desc=desc)
        if desc.cg_mode == CUDAGraphMode.FULL:
            manager.run_fullgraph(desc)
        else:
            self._generate_draft(count, desc.num_tokens, longest)

    def _build_attn_metadata(self, *, num_reqs: int, batch_desc: Any) -> int:
        replays = batch_desc.cg_mode == CUDAGraphMode.FULL
        tokens = batch_desc.num_tokens if replays else num_reqs * self.width
        self.metadata_tokens = tokens
        return self.draft_max_seq_len

    def _generate_draft(self, num_reqs: int, num_tokens: int, longest: int) -> None:
        assert self.metadata_tokens == num_tokens
        self.further((self.weight, self.head), num_reqs, num_tokens, longest)

    def further(self, state: Any, num_reqs: int, padded: int, longest: int) -> None:
        raise NotImplementedError


class OneByOne(Speculator):
    """As MTP: the first token after the model's step, by its metadata, then one more,
    each by graphs of its own."""

    width = 1

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.prefill_cudagraph_manager = DraftManager(SIZES, self.new)
        self.decode_cudagraph_manager = DraftManager((1, 3, MOST), self.width)
        # More rows than a step has, as of the longest one.
        self.before_head = runner.model.get_mtp_target_hidden_states = lambda: (
            torch.cat(
                [runner.execute_model_state.hidden_states * 2, torch.ones(1, WIDTH)]
            )
        )

    def begin(
        self, batch: Batch, hidden: torch.Tensor, rejected: Any, sampled: Any
    ) -> None:
        assert torch.equal(hidden, self.before_head()[:-1]), "rows of another kind"
        super().begin(batch, hidden, rejected, sampled)

    def capture(self) -> None:
        state = self.weight, self.head
        self.prefill_cudagraph_manager.capture(self.first, state)
        self.decode_cudagraph_manager.capture(self.further, state)

    def draft(self, batch: Batch, longest: int) -> None:
        count = batch.num_reqs
        # A graph is of uniform steps alone.
        uniform = set(batch.counts) == {self.new}
        manager = self.prefill_cudagraph_manager
        desc = manager.dispatch(count, batch.padded if uniform else 1 << 30)
        if desc.cg_mode == CUDAGraphMode.FULL:
            manager.run_fullgraph(desc)
        else:
            self._prefill(count, batch.padded, longest)
        self.generate(self.decode_cudagraph_manager, count)

    def first(self, state: Any, num_reqs: int, padded: int, longest: int) -> None:
        self.compute(state, num_reqs, padded, longest, 0)

    def _prefill(self, num_reqs: int, num_tokens: int, longest: int) -> None:
        self.first((self.weight, self.head), num_reqs, num_tokens, longest)

    def further(self, state: Any, num_reqs: int, padded: int, longest: int) -> None:
        self.compute(state, num_reqs, padded, longest, 1)


class AllAtOnce(Speculator):
    """As DSpark: all tokens of a request by one graph, of other numbers of requests
    than the model's."""

    width = STEPS

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.query_cudagraph_manager = DraftManager((1, 3, 4), self.width)

    def capture(self) -> None:
        state = self.weight, self.head
        self.query_cudagraph_manager.capture(self.further, state)

    def draft(self, batch: Batch, longest: int) -> None:
        self.generate(self.query_cudagraph_manager, batch.num_reqs)

    def further(self, state: Any, num_reqs: int, padded: int, longest: int) -> None:
        for step in range(STEPS):
            self.compute(state, num_reqs, padded, longest, step)


def moved_weight(speculator: Speculator) -> None:
    """A graph reads the layer's weight where it was."""
    old, speculator.weight = speculator.weight, speculator.weight.clone()
    old.normal_()


def moved_head(speculator: Speculator) -> None:
    """As `moved_weight`, where the tokens alone show it."""
    old, speculator.head = speculator.head, speculator.head.clone()
    old.normal_()
