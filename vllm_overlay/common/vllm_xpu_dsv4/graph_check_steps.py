# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Steps of a model runner as the scheduler's, by graphs or not, and what they gave."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import get_pp_group
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm_xpu_dsv4.graph_check_cases import Case, random_tokens
from vllm_xpu_dsv4.graph_check_drafts import (
    DraftGraphs,
    Drafts,
    num_draft_tokens,
    row_error,
)
from vllm_xpu_dsv4.graph_check_twins import eager_twin, without_graphs
from vllm_xpu_dsv4.graph_check_writes import Digests, written

DRAFT_TOKENS = "the tokens of drafts"
# Requests, and how many tokens behind the computed ones a step computes of each.
Scheduled = list[tuple[NewRequestData, int]]


class Outcome(NamedTuple):
    """What a step computed: hidden states, `[num_tokens, hidden_size]` in float32, the
    graph that it took, where the runner says so, what it wrote to the caches, and its
    drafts, where the case has them."""

    rows: torch.Tensor
    stat: CUDAGraphStat | None
    digests: Digests = {}
    drafts: Drafts | None = None

    def error(self, expected: "Outcome") -> float:
        """The largest distance of a row from the expected one, relative to its norm."""
        error = row_error(self.rows, expected.rows)
        if self.drafts is not None and expected.drafts is not None:
            error = max(error, self.drafts.error(expected.drafts))
        return error


class Steps:
    """Runs steps of one model runner, of either version."""

    def __init__(self, runner: Any, drafts: DraftGraphs) -> None:
        self.runner = runner
        self.drafts = drafts
        self.running: set[str] = set()

    def finish(self) -> None:
        """Let the runner forget the check's requests."""
        self._step([], nullcontext())

    def prefill(self, requests: list[NewRequestData]) -> None:
        """Compute contexts in eager steps of as many tokens as a step may have."""
        after = random_tokens(self.runner, 1, seed=0)
        places = [(r, i) for r in requests for i in range(r.num_computed_tokens)]
        size = self.runner.max_num_tokens
        for first in range(0, len(places), size):
            step = places[first : first + size]
            counts = Counter(request.req_id for request, _ in step)
            starts = {request.req_id: (request, i) for request, i in reversed(step)}
            scheduled = [
                (continued(request, after, start), counts[request.req_id])
                for request, start in reversed(starts.values())
            ]
            context = self._eager(without_graphs(self.runner))
            self._step(scheduled, context, proposes=bool(self.drafts.managers))
        self.drafts.sizes.clear()

    def run(self, case: Case, seed: int, eager: bool = False) -> Outcome:
        """Run a case's batch with the tokens that `seed` gives."""
        new = case.num_new_tokens
        tokens = random_tokens(self.runner, new * len(case.requests), seed)
        scheduled = [
            (continued(r, tokens[i * new : (i + 1) * new], r.num_computed_tokens), new)
            for i, r in enumerate(case.requests)
        ]
        # Version 2 takes a prompt's last token and drafts for a decode step.
        version_2 = getattr(self.runner, "cudagraph_manager", None) is not None
        decodes = version_2 and case.mode != CUDAGraphMode.PIECEWISE
        outcome = self._step(
            scheduled,
            self._eager(eager_twin(self.runner, case.mode)) if eager else nullcontext(),
            spec_tokens=new - 1 if decodes else 0,
            graph_tokens=case.graph_tokens,
            proposes=case.drafts,
        )
        if outcome.drafts is not None:
            new += num_draft_tokens(self.runner)
        digests = written(self.runner, case.requests, new)
        if outcome.drafts is not None:
            digests[DRAFT_TOKENS] = outcome.drafts.tokens
        return outcome._replace(digests=digests)

    @contextmanager
    def _eager(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """Eager drafts as well."""
        with context, self.drafts.replaced_by_twins():
            yield

    def _step(
        self,
        scheduled: Scheduled,
        context: AbstractContextManager[None],
        spec_tokens: int = 0,
        graph_tokens: int = 0,
        proposes: bool = False,
    ) -> Outcome:
        """Run one step as the scheduler's; nothing is sampled."""
        counts = {request.req_id: count for request, count in scheduled}
        num_tokens = sum(counts.values())
        output = SchedulerOutput.make_empty()
        output.finished_req_ids, self.running = self.running, set(counts)
        output.scheduled_new_reqs = [request for request, _ in scheduled]
        output.num_scheduled_tokens = counts
        output.total_num_scheduled_tokens = num_tokens
        if spec_tokens:
            drafts = {req_id: [0] * spec_tokens for req_id in counts}
            output.scheduled_spec_decode_tokens = drafts
        received = None
        if not get_pp_group().is_first_rank:
            received = self._intermediate_tensors(max(num_tokens, graph_tokens))
        proposed = None
        with context:
            result = self.runner.execute_model(output, received)
            state = self.runner.execute_model_state
            if proposes:
                sampled = random_tokens(self.runner, len(counts), seed=len(counts))
                proposed = self.drafts.propose(state, spec_tokens, sampled)
            self.runner.execute_model_state = None
        if isinstance(result, IntermediateTensors):
            rows = [t[:num_tokens].flatten(1) for t in result.tensors.values()]
        elif state is not None:
            rows = [state.hidden_states[:num_tokens].flatten(1)]
        else:
            rows = [torch.empty(0, 0)]
        # A copy, as the next replay writes to the same memory.
        copied = torch.cat(rows, dim=1).float().clone()
        return Outcome(copied, state and state.cudagraph_stats, drafts=proposed)

    def _intermediate_tensors(self, num_tokens: int) -> IntermediateTensors:
        """Random input of a later pipeline stage, the same on all its ranks."""
        generator = torch.Generator().manual_seed(num_tokens)
        tensors = {
            name: torch.randn((num_tokens, *t.shape[1:]), generator=generator).to(t)
            for name, t in self.runner.intermediate_tensors.items()
        }
        return IntermediateTensors(tensors)


def continued(
    request: NewRequestData, tokens: list[int], num_computed_tokens: int
) -> NewRequestData:
    """A request of the check with tokens behind its context."""
    prompt = [*(request.prompt_token_ids or ()), *tokens]
    return replace(
        request,
        prompt_token_ids=prompt,
        prefill_token_ids=prompt,
        num_computed_tokens=num_computed_tokens,
    )
