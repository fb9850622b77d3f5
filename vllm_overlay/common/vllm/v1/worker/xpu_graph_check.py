# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compare the captured graphs of an XPU with eager execution, once, at start.

A graph that reads memory which has moved, or a number of the host that was true
while it was captured, answers with wrong text and no error. So each captured size
is replayed on requests that the capture did not see, and the same step is run again
in eager mode. Steps that serve are as they were.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

import vllm.envs as envs
from vllm import SamplingParams
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphStat, CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import get_pp_group, get_world_group
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

logger = init_logger(__name__)

# What layers have in their caches, by the layers' names in the model's order.
Pages = dict[str, torch.Tensor]

# How far a row of hidden states may be from its eager twin, relative to the twin's
# norm: NOISE_FACTOR times as far as eager rows of one request are from each other in
# batches of two sizes, within these limits.
NOISE_FACTOR, MIN_BOUND, MAX_BOUND = 4.0, 0.05, 0.5
# Tokens in the cache before the step, by turns. The long ones end a page, and an
# entry of each compressed cache.
CONTEXTS = (255, 3, 4, 5, 6, 7, 8, 9, 127, 10, 11, 12, 13, 14, 15, 16)
# Plain text in every vocabulary: special tokens and those of images lie elsewhere.
MAX_TOKEN_ID = 1000


class CachedRequest(NamedTuple):
    """A request whose first tokens are in the cache, with room for the next ones."""

    req_id: str
    token_ids: list[int]
    block_ids: tuple[list[int], ...]


class Case(NamedTuple):
    """A captured graph, and a batch that is replayed by it."""

    mode: CUDAGraphMode
    graph_tokens: int
    requests: list[CachedRequest]
    num_new_tokens: int
    inputs: str

    def __str__(self) -> str:
        return f"{self.mode.name} graph of {self.graph_tokens} tokens ({self.inputs})"


class ScheduledRequest(NamedTuple):
    """A request of one step: its prompt, and which tokens of it are computed."""

    request: CachedRequest
    prompt: list[int]
    num_computed_tokens: int
    num_tokens: int


def check_captured_graphs(runner: Any) -> None:
    """Compare each captured size of a model runner with eager execution.

    If one differs on any rank, all ranks drop their graphs and serve in eager mode,
    or stop if VLLM_XPU_GRAPH_CHECK is "stop".

    Raises:
        RuntimeError: a graph differs and VLLM_XPU_GRAPH_CHECK is "stop", or replays
            have written to memory of others, so that eager mode is wrong as well.

    """
    if envs.VLLM_XPU_GRAPH_CHECK == "off":
        return
    if runner.vllm_config.kv_transfer_config is not None or (
        runner.model_config.runner_type == "pooling"
    ):
        logger.warning(
            "Captured graphs are not compared with eager execution: the check does "
            "not know KV connectors and pooling models."
        )
        return
    start = time.perf_counter()
    check = GraphCheck(runner)
    difference = check.run()
    logger.info(
        "Checking the captured graphs took %.1f secs", time.perf_counter() - start
    )
    if difference is None:
        return
    if check.damaged:
        raise RuntimeError(
            f"{difference} Replays have written to memory of others: after them an "
            "eager step is another one than before. Start with --enforce-eager, "
            "which captures no graphs."
        )
    if envs.VLLM_XPU_GRAPH_CHECK == "stop":
        raise RuntimeError(
            f"{difference} VLLM_XPU_GRAPH_CHECK=fallback serves without graphs; "
            "--enforce-eager captures none."
        )
    logger.error("%s Serving without graphs.", difference)
    drop_graphs(runner)


class GraphCheck:
    """The comparison for one model runner, of either version."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.manager = getattr(runner, "cudagraph_manager", None)
        self.config = runner.vllm_config
        self.kv_cache_config = runner.kv_cache_config
        self.running: set[str] = set()
        self.next_block = 1  # Block 0 is the null block.
        self.damaged = False

    @torch.inference_mode()
    def run(self) -> str | None:
        """Returns the first difference in words, or None: the same one on all ranks."""
        metrics = self.config.observability_config
        wanted, metrics.cudagraph_metrics = metrics.cudagraph_metrics, True
        try:
            return self._compare(self._cases())
        finally:
            self._step([])
            metrics.cudagraph_metrics = wanted

    def _compare(self, cases: list[Case]) -> str | None:
        if not cases:
            return None
        noise = self._noise(cases)
        bound = min(max(MIN_BOUND, NOISE_FACTOR * noise), MAX_BOUND)
        untouched = self._eager_reference(cases[0])
        errors, missed = [], []
        for seed, case in enumerate(cases):
            replayed, stat = self._run(case, seed)
            used = (str(case.mode), case.graph_tokens)
            if stat and (stat.runtime_mode, stat.num_padded_tokens) != used:
                missed.append(str(case))
            errors.append(_row_error(replayed, self._run(case, seed, eager=True)[0]))
        again = self._eager_reference(cases[0])
        damage = _row_error(again[0], untouched[0])
        if missed:
            logger.warning("No batch came to the %s: not checked", ", ".join(missed))
        wrong = [i for i, error in enumerate(errors) if not error <= bound]
        first = self._first_of_all_ranks(wrong[0] if wrong else len(cases))
        self.damaged = not self._first_of_all_ranks(int(damage <= bound))
        if first < len(cases):
            subject = f"The {cases[first]} differs from eager execution"
            layer = self._first_layer(cases[first], first, bound)
        elif self.damaged:
            subject = f"The eager step of the {cases[0]} is another one after replays"
            layer = _first_difference(*again[1:], untouched[2], bound)
        else:
            logger.info(
                "%d batches are the same by captured graphs and in eager mode: rows "
                "differ by up to %.2g, eager rows in batches of two sizes by %.2g "
                "(bound %.2g)",
                *(len(cases) - len(missed), max(errors), noise, bound),
            )
            return None
        error = errors[first] if first < len(cases) else damage
        return (
            f"{subject}: on this rank a row is off by {error:.2g} of its norm (bound "
            f"{bound:.2g}); the first layer that differs lies {layer}."
        )

    def _cases(self) -> list[Case]:
        """Two batches for each size of decode graphs, a prompt for each other size."""
        if self.manager is not None:
            descs = self.manager._capture_descs
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
        most = max((d.num_tokens // d.num_reqs for d in full), default=0)
        pool = self._cached_requests(max((d.num_reqs for d in full), default=0), most)
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
        sizes = [
            d.num_tokens for d in prompts if d.num_tokens < self.runner.max_model_len
        ]
        if sizes and (blocks := self._allocate(max(sizes))):
            prompt = [CachedRequest("_graph_check_prompt", [], blocks)]
            cases += [
                Case(CUDAGraphMode.PIECEWISE, size, prompt, size, "a prompt")
                for size in sizes
            ]
        return cases

    def _cached_requests(self, count: int, num_new_tokens: int) -> list[CachedRequest]:
        """Requests whose contexts are in the cache, as many as find blocks."""
        limit = min(
            self.runner.max_model_len - num_new_tokens - 1, self.runner.max_num_tokens
        )
        requests: list[CachedRequest] = []
        for i in range(count):
            context = min(CONTEXTS[i % len(CONTEXTS)], limit)
            blocks = self._allocate(context + num_new_tokens)
            if blocks is None:
                break
            tokens = self._tokens(context, seed=i)
            requests.append(CachedRequest(f"_graph_check_{i}", tokens, blocks))
        batch: list[CachedRequest] = []
        for request in requests:
            tokens_of_batch = sum(len(r.token_ids) for r in batch)
            if tokens_of_batch + len(request.token_ids) > self.runner.max_num_tokens:
                self._prefill(batch)
                batch = []
            batch.append(request)
        if batch:
            self._prefill(batch)
        return requests

    def _allocate(self, num_tokens: int) -> tuple[list[int], ...] | None:
        """Blocks of each group that no other request of the check has."""
        blocks = []
        first = self.next_block
        for group in self.kv_cache_config.kv_cache_groups:
            # A ring of compressor state is one block, whatever the length.
            count = group.kv_cache_spec.max_num_blocks_per_req(self.config, num_tokens)
            blocks.append(list(range(first, first + count)))
            first += count
        if first > self.kv_cache_config.num_blocks:
            return None
        self.next_block = first
        return tuple(blocks)

    def _tokens(self, count: int, seed: int) -> list[int]:
        size = min(MAX_TOKEN_ID, self.runner.model_config.get_vocab_size())
        random = torch.Generator().manual_seed(seed)
        return torch.randint(size, (count,), generator=random).tolist()

    def _prefill(self, requests: list[CachedRequest]) -> None:
        after = self._tokens(1, seed=0)
        self._step(
            [
                ScheduledRequest(r, r.token_ids + after, 0, len(r.token_ids))
                for r in requests
            ],
            eager=True,
        )

    def _run(
        self, case: Case, seed: int, eager: bool = False
    ) -> tuple[torch.Tensor, CUDAGraphStat | None]:
        """Run a case's batch with the tokens that `seed` gives."""
        new = case.num_new_tokens
        tokens = self._tokens(new * len(case.requests), seed)
        parts = [tokens[i : i + new] for i in range(0, len(tokens), new)]
        scheduled = [
            ScheduledRequest(r, r.token_ids + part, len(r.token_ids), new)
            for r, part in zip(case.requests, parts)
        ]
        # Version 2 takes a prompt's last token and drafts for a decode step.
        decodes = self.manager is not None and case.mode == CUDAGraphMode.FULL
        drafts = new - 1 if decodes else 0
        return self._step(scheduled, drafts, case.graph_tokens, eager)

    def _step(
        self,
        scheduled: list[ScheduledRequest],
        drafts: int = 0,
        graph_tokens: int = 0,
        eager: bool = False,
    ) -> tuple[torch.Tensor, CUDAGraphStat | None]:
        """Run one step as the scheduler's; nothing is sampled.

        Returns its hidden states, `[num_tokens, hidden_size]` in float32, and what
        graph it took, where the runner says so.
        """
        runner = self.runner
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
        if drafts:
            output.scheduled_spec_decode_tokens = {
                s.request.req_id: [0] * drafts for s in scheduled
            }
        num_tokens = sum(s.num_tokens for s in scheduled)
        output.total_num_scheduled_tokens = num_tokens
        groups = self.kv_cache_config.kv_cache_groups
        output.num_common_prefix_blocks = [0] * len(groups)
        received = None
        if not get_pp_group().is_first_rank:
            received = self._intermediate_tensors(max(num_tokens, graph_tokens))
        with self._without_graphs() if eager else nullcontext():
            result = runner.execute_model(output, received)
        state, runner.execute_model_state = runner.execute_model_state, None
        if isinstance(result, IntermediateTensors):
            rows = [t[:num_tokens].flatten(1) for t in result.tensors.values()]
        elif state is not None:
            rows = [state.hidden_states[:num_tokens].flatten(1)]
        else:
            rows = [torch.empty(0, 0)]
        # A copy, as the next replay writes to the same memory.
        return torch.cat(rows, dim=1).float().clone(), state and state.cudagraph_stats

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

    @contextmanager
    def _without_graphs(self) -> Iterator[None]:
        dispatch: tuple[Any, str, Any] = (self.manager, "_graphs_captured", False)
        if self.manager is None:
            dispatcher = self.runner.cudagraph_dispatcher
            dispatch = (dispatcher, "cudagraph_mode", CUDAGraphMode.NONE)
        owner, name, value = dispatch
        before = getattr(owner, name)
        setattr(owner, name, value)
        try:
            yield
        finally:
            setattr(owner, name, before)

    def _noise(self, cases: list[Case]) -> float:
        """How far eager rows of the same requests are in a batch of half the size."""
        decode = [case for case in cases if case.mode == CUDAGraphMode.FULL]
        if not decode or len(decode[-1].requests) < 2:
            return 0.0
        case = max(decode, key=lambda case: len(case.requests))
        half = len(case.requests) // 2
        whole = self._run(case, 0, eager=True)[0][: half * case.num_new_tokens]
        part = case._replace(requests=case.requests[:half])
        return _row_error(self._run(part, 0, eager=True)[0], whole)

    def _first_of_all_ranks(self, index: int) -> int:
        first = torch.tensor(index)
        torch.distributed.all_reduce(
            first, torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group
        )
        return int(first)

    def _first_layer(self, case: Case, seed: int, bound: float) -> str:
        """Find where a case differs first by what each layer writes to its cache."""
        self._run(case, seed + 1, eager=True)
        before = self._written(case)
        self._run(case, seed)
        replayed = self._written(case)
        self._run(case, seed, eager=True)
        return _first_difference(before, replayed, self._written(case), bound)

    def _eager_reference(self, case: Case) -> tuple[torch.Tensor, Pages, Pages]:
        """Rows of an eager step, and the caches before and after it."""
        self._run(case, 1, eager=True)
        before = self._written(case)
        rows = self._run(case, 0, eager=True)[0]
        return rows, before, self._written(case)

    def _written(self, case: Case) -> Pages:
        """The blocks that a case's step writes, by layer, in the model's order."""
        pages = {}
        layers = self.config.compilation_config.static_forward_context
        total = self.kv_cache_config.num_blocks
        for g, group in enumerate(self.kv_cache_config.kv_cache_groups):
            size = group.kv_cache_spec.block_size
            blocks = [
                r.block_ids[g][(len(r.token_ids) + i) // size % len(r.block_ids[g])]
                for r in case.requests
                for i in range(case.num_new_tokens)
            ]
            for name in group.layer_names:
                cache = layers[name].kv_cache
                # Blocks of a kernel may be parts of those of the scheduler.
                dim = next(d for d, n in enumerate(cache.shape) if n % total == 0)
                parts = cache.unflatten(dim, (total, -1))
                index = torch.tensor(sorted(set(blocks)), device=cache.device)
                pages[name] = parts.index_select(dim, index)
        return dict(sorted(pages.items(), key=lambda p: extract_layer_index(p[0])))


def drop_graphs(runner: Any) -> None:
    """Free the captured graphs, those of drafts as well, and dispatch to none."""
    if (manager := getattr(runner, "cudagraph_manager", None)) is not None:
        managers = [manager]
        if runner.speculator is not None:
            values = vars(runner.speculator).values()
            managers += [v for v in values if isinstance(v, CudaGraphManager)]
        for manager in managers:
            manager.graphs.clear()
            manager._graphs_captured = False
    else:
        runner.cudagraph_dispatcher.cudagraph_mode = CUDAGraphMode.NONE
        CUDAGraphWrapper.clear_all_graphs()
    BreakableCUDAGraphWrapper.clear_all_graphs()
    torch.accelerator.empty_cache()


def _row_error(rows: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance of a row from the expected one, relative to its norm."""
    distances = (rows - expected).norm(dim=1)
    errors = (distances / expected.norm(dim=1)).where(distances != 0, 0.0)
    # NaN is largest: it is no agreement.
    return float(errors.nan_to_num(nan=float("inf")).max())


def _first_difference(
    before: Pages, given: Pages, expected: Pages, bound: float
) -> str:
    previous = "the input"
    for name in before:
        if _cache_differs(given[name], expected[name], before[name], bound):
            return f"after {previous}, up to {name}"
        previous = name
    return f"after {previous}"


def _cache_differs(
    replayed: torch.Tensor, eager: torch.Tensor, before: torch.Tensor, bound: float
) -> bool:
    """Whether what a replay wrote is not what the eager step wrote.

    Both differ in rounding, so values that are more than a byte are compared by their
    norm, and of bytes, which are codes, more than half must differ.
    """
    if eager.element_size() == 1:
        codes = [t.view(torch.uint8) for t in (replayed, eager, before)]
        written = (codes[0] != codes[2]) | (codes[1] != codes[2])
        return bool(2 * (codes[0] != codes[1]).sum() > written.sum())
    written = (replayed != before) | (eager != before)
    wrong = (replayed - eager)[written].float().norm()
    return not bool(wrong <= bound * eager[written].float().norm())
