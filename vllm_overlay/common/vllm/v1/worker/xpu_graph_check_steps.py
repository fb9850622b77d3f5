# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Steps of a model runner as the scheduler's, by graphs or not, and what they gave."""

from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch

from vllm import SamplingParams
from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.models.utils import extract_layer_index
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.worker.workspace import use_workspace_lane
from vllm.v1.worker.xpu_graph_check_cases import (
    CachedRequest,
    Case,
    num_draft_tokens,
    random_tokens,
)
from vllm.v1.worker.xpu_graph_check_twins import (
    EagerDrafts,
    eager_twin,
    without_graphs,
)

# A number for each block that a step wrote, by the caches' names in the model's order,
# and the tokens of drafts.
Digests = dict[str, torch.Tensor]
DRAFT_TOKENS = "the tokens of drafts"


class Drafts(NamedTuple):
    """What a speculator proposed: tokens, `[num_reqs, num_speculative_tokens]`, and a
    row of its hidden states for each request in float32."""

    tokens: torch.Tensor
    rows: torch.Tensor

    def error(self, expected: "Drafts") -> float:
        """As `row_error`, of requests with the same tokens: rows behind others are
        others. Infinity if there is no such request."""
        same = (self.tokens == expected.tokens).all(dim=1)
        if not same.any():
            return float("inf")
        return row_error(self.rows[same], expected.rows[same])


class Outcome(NamedTuple):
    """What a step computed: hidden states, `[num_tokens, hidden_size]` in float32,
    what it wrote to the caches, the graph that it took, where the runner says so, and
    its drafts, where the case has them.
    """

    rows: torch.Tensor
    written: Digests
    stat: CUDAGraphStat | None
    drafts: Drafts | None = None

    def error(self, expected: "Outcome") -> float:
        """The largest distance of a row from the expected one, relative to its norm."""
        error = row_error(self.rows, expected.rows)
        if self.drafts is not None and expected.drafts is not None:
            error = max(error, self.drafts.error(expected.drafts))
        return error

    def difference(self, expected: "Outcome") -> str | None:
        """The layers between which the caches differ first, in words."""
        previous = "the input"
        for name, digests in expected.written.items():
            if not torch.equal(self.written[name], digests):
                return f"after {previous}, up to {name}"
            previous = name
        return None


class ScheduledRequest(NamedTuple):
    """A request of one step: its prompt, and which tokens of it are computed."""

    request: CachedRequest
    prompt: list[int]
    num_computed_tokens: int
    num_tokens: int


class Steps:
    """Runs steps of one model runner, of either version."""

    def __init__(self, runner: Any, drafts: EagerDrafts) -> None:
        self.runner = runner
        self.drafts = drafts
        self.kv_cache_config = runner.kv_cache_config
        self.running: set[str] = set()

    def finish(self) -> None:
        """Let the runner forget the check's requests."""
        self._step([])

    def prefill(self, requests: list[CachedRequest]) -> None:
        """Compute contexts in eager steps of as many tokens as a step may have."""
        after = random_tokens(self.runner, 1, seed=0)
        room = self.runner.max_num_tokens
        steps: list[list[ScheduledRequest]] = [[]]
        for request in requests:
            prompt, done = request.token_ids + after, 0
            while done < len(request.token_ids):
                if room == 0:
                    steps.append([])
                    room = self.runner.max_num_tokens
                count = min(len(request.token_ids) - done, room)
                steps[-1].append(ScheduledRequest(request, prompt, done, count))
                done, room = done + count, room - count
        proposes = bool(self.drafts.managers)
        for step in filter(None, steps):
            contexts = without_graphs(self.runner), self.drafts.replacing_graphs()
            self._step(step, *contexts, proposes=proposes)
        self.drafts.sizes.clear()

    def run(self, case: Case, seed: int, eager: bool = False) -> Outcome:
        """Run a case's batch with the tokens that `seed` gives."""
        new = case.num_new_tokens
        tokens = random_tokens(self.runner, new * len(case.requests), seed)
        parts = [tokens[i : i + new] for i in range(0, len(tokens), new)]
        scheduled = [
            ScheduledRequest(r, r.token_ids + part, len(r.token_ids), new)
            for r, part in zip(case.requests, parts)
        ]
        # Version 2 takes a prompt's last token and drafts for a decode step.
        version_2 = getattr(self.runner, "cudagraph_manager", None) is not None
        decodes = version_2 and case.mode != CUDAGraphMode.PIECEWISE
        contexts: tuple[AbstractContextManager[None], ...] = ()
        if eager:
            twin = eager_twin(self.runner, case.mode)
            contexts = twin, self.drafts.replacing_graphs()
        outcome = self._step(
            scheduled,
            *contexts,
            spec_tokens=new - 1 if decodes else 0,
            graph_tokens=case.graph_tokens,
            proposes=case.drafts,
        )
        written = self._written(case)
        if outcome.drafts is not None:
            written[DRAFT_TOKENS] = outcome.drafts.tokens
        return outcome._replace(written=written)

    def _step(
        self,
        scheduled: list[ScheduledRequest],
        *contexts: AbstractContextManager[None],
        spec_tokens: int = 0,
        graph_tokens: int = 0,
        proposes: bool = False,
    ) -> Outcome:
        """Run one step as the scheduler's; nothing is sampled."""
        output = self._scheduled(scheduled, spec_tokens)
        num_tokens = output.total_num_scheduled_tokens
        received = None
        if not get_pp_group().is_first_rank:
            received = self._intermediate_tensors(max(num_tokens, graph_tokens))
        drafts = None
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            result = self.runner.execute_model(output, received)
            state = self.runner.execute_model_state
            if proposes:
                drafts = self._propose(state, spec_tokens)
            self.runner.execute_model_state = None
        if isinstance(result, IntermediateTensors):
            rows = [t[:num_tokens].flatten(1) for t in result.tensors.values()]
        elif state is not None:
            rows = [state.hidden_states[:num_tokens].flatten(1)]
        else:
            rows = [torch.empty(0, 0)]
        # A copy, as the next replay writes to the same memory.
        copied = torch.cat(rows, dim=1).float().clone()
        return Outcome(copied, {}, state and state.cudagraph_stats, drafts)

    def _scheduled(
        self, scheduled: list[ScheduledRequest], spec_tokens: int
    ) -> SchedulerOutput:
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = self.running
        self.running = {s.request.req_id for s in scheduled}
        output.scheduled_new_reqs = [
            NewRequestData(
                req_id=s.request.req_id,
                prompt_token_ids=s.prompt,
                mm_features=[],
                sampling_params=SamplingParams(temperature=0.0),
                pooling_params=None,
                block_ids=s.request.block_ids,
                num_computed_tokens=s.num_computed_tokens,
                lora_request=None,
                prefill_token_ids=s.prompt,
            )
            for s in scheduled
        ]
        output.num_scheduled_tokens = {
            s.request.req_id: s.num_tokens for s in scheduled
        }
        if spec_tokens:
            output.scheduled_spec_decode_tokens = {
                s.request.req_id: [0] * spec_tokens for s in scheduled
            }
        output.total_num_scheduled_tokens = sum(s.num_tokens for s in scheduled)
        groups = self.kv_cache_config.kv_cache_groups
        output.num_common_prefix_blocks = [0] * len(groups)
        return output

    def _propose(self, state: Any, spec_tokens: int) -> Drafts:
        """Drafts after a step, of which requests rejected none up to all in turn."""
        runner, batch = self.runner, state.input_batch
        hidden_states = state.hidden_states
        # DeepSeek-V4's MTP takes what the model had before its head.
        get = getattr(runner.model, "get_mtp_target_hidden_states", None)
        if get is not None and (before_head := get()) is not None:
            hidden_states = before_head[: len(hidden_states)]
        count, device = batch.num_reqs, batch.idx_mapping.device
        numbers = torch.arange(count, dtype=torch.int32, device=device)
        sampled = torch.zeros_like(runner.req_states.last_sampled_tokens)
        chosen = random_tokens(runner, count, seed=count)
        sampled.view(-1)[batch.idx_mapping] = torch.tensor(chosen).to(sampled)
        sampling = runner.sampler.sampling_states
        # Named by what the data-parallel ranks of each release agree on.
        agreed = {n: v for n, v in state._asdict().items() if n.startswith("dp_sync")}
        with use_workspace_lane(runner._draft_workspace_lane):
            tokens = runner.speculator.propose(
                batch,
                state.attn_metadata,
                state.slot_mappings_by_layer,
                hidden_states,
                state.aux_hidden_states,
                torch.ones_like(numbers),
                numbers % (spec_tokens + 1),
                sampled,
                runner.req_states.next_prefill_tokens,
                sampling.temperature.gpu,
                sampling.seeds.gpu,
                **agreed,
            )
        rows = runner.speculator.hidden_states[:count]
        return Drafts(tokens.clone(), rows.float().clone())

    def _intermediate_tensors(self, num_tokens: int) -> IntermediateTensors:
        """Random input of a later pipeline stage, the same on all its ranks."""
        generator = torch.Generator().manual_seed(num_tokens)
        return IntermediateTensors(
            {
                name: torch.randn(
                    (num_tokens, *tensor.shape[1:]), generator=generator
                ).to(tensor)
                for name, tensor in self.runner.intermediate_tensors.items()
            }
        )

    def _written(self, case: Case) -> Digests:
        """Numbers of the blocks that a case's step and its drafts write, in the model's
        order."""
        digests = {}
        config = self.runner.vllm_config.compilation_config
        layers = config.static_forward_context
        total = self.kv_cache_config.num_blocks
        length = case.num_new_tokens
        length += num_draft_tokens(self.runner) if case.drafts else 0
        for g, group in enumerate(self.kv_cache_config.kv_cache_groups):
            size = group.kv_cache_spec.block_size
            blocks = [
                r.block_ids[g][(len(r.token_ids) + i) // size % len(r.block_ids[g])]
                for r in case.requests
                for i in range(length)
            ]
            for name in group.layer_names:
                cache = layers[name].kv_cache
                # Blocks of a kernel may be parts of those of the scheduler.
                dim = next(d for d, n in enumerate(cache.shape) if n % total == 0)
                parts = cache.unflatten(dim, (total, -1))
                index = torch.tensor(sorted(set(blocks)), device=cache.device)
                pages = parts.index_select(dim, index).movedim(dim, 0)
                digests[name] = page_digests(pages.flatten(1).contiguous())
        return dict(sorted(digests.items(), key=lambda d: extract_layer_index(d[0])))


def row_error(rows: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance of a row from the expected one, relative to its norm."""
    distances = (rows - expected).norm(dim=1)
    errors = distances / expected.norm(dim=1)
    # NaN is largest: it is no agreement.
    errors = errors.where(distances != 0, 0.0).nan_to_num(nan=float("inf"))
    return float(errors.max())


def page_digests(pages: torch.Tensor) -> torch.Tensor:
    """A number for the bytes of each page, `[num_pages]`: exact, in any order of
    additions, and without a copy of the pages that stays."""
    values = pages.view(torch.uint8).long()
    random = torch.Generator().manual_seed(0)
    weights = torch.randint(1 << 62, values.shape[1:], generator=random)
    return (values * weights.to(values.device)).sum(1)
