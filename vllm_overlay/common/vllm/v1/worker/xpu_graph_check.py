# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compare the captured graphs of an XPU with eager execution, once, at start.

A graph that reads memory which has moved, or a number of the host that was true
while it was captured, answers with wrong text and no error. So each captured size
is replayed on requests that the capture did not see, and the same step is run again
in eager mode, padded as the graph is: both then launch the same kernels on the same
shapes, and a graph without a fault gives the same rows and caches. Steps that serve
are as they were.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
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
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

logger = init_logger(__name__)

# A number for each block that a step wrote, by the caches' names in the model's order.
Digests = dict[str, torch.Tensor]

# The models whose caches a step may write again. A step of a recurrent layer moves its
# state on, so the same step cannot run by a graph and in eager mode.
MODEL_TYPES = ("deepseek_v4", "deepseek_v41")
# How far a row of hidden states may be from its eager twin, relative to the twin's
# norm: a hundredth of what a wrong weight or number changed in any layer. Where an
# eager step is not the same when it runs again, before any replay, NOISE_FACTOR times
# that distance.
BOUND, NOISE_FACTOR, MAX_BOUND = 1e-3, 4.0, 0.5
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
    """A captured graph, and a batch that is replayed by it."""

    mode: CUDAGraphMode
    graph_tokens: int
    requests: list[CachedRequest]
    num_new_tokens: int
    inputs: str

    def __str__(self) -> str:
        return f"{self.mode.name} graph of {self.graph_tokens} tokens ({self.inputs})"


class Outcome(NamedTuple):
    """What a step computed: hidden states, `[num_tokens, hidden_size]` in float32,
    what it wrote to the caches, and the graph that it took, where the runner says so.
    """

    rows: torch.Tensor
    written: Digests
    stat: CUDAGraphStat | None

    def error(self, expected: "Outcome") -> float:
        """The largest distance of a row from the expected one, relative to its norm."""
        distances = (self.rows - expected.rows).norm(dim=1)
        errors = distances / expected.rows.norm(dim=1)
        # NaN is largest: it is no agreement.
        errors = errors.where(distances != 0, 0.0).nan_to_num(nan=float("inf"))
        return float(errors.max())

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


def check_captured_graphs(runner: Any) -> None:
    """Compare each captured size of a model runner with eager execution, if the model
    is of DeepSeek-V4's family.

    If one differs on any rank, all ranks drop their graphs and serve in eager mode,
    or stop if VLLM_XPU_GRAPH_CHECK is "stop".

    Raises:
        RuntimeError: a graph differs and VLLM_XPU_GRAPH_CHECK is "stop", or replays
            have written to memory of others, so that eager mode is wrong as well.

    """
    config = runner.model_config.hf_text_config
    if envs.VLLM_XPU_GRAPH_CHECK == "off" or (
        getattr(config, "model_type", None) not in MODEL_TYPES
    ):
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


class Wrapper:
    """An object with some methods of its own in front of another's."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class EagerManager(Wrapper):
    """A manager that gives a step the padding of its graph, and no graph."""

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        desc = self._wrapped.dispatch(*args, **kwargs)
        return replace(desc, cg_mode=CUDAGraphMode.NONE)


class CapturedState(Wrapper):
    """A model's state whose attention metadata are those of a captured step: padded,
    with the tables of the longest context."""

    def prepare_attn(self, batch: Any, mode: Any, *args: Any, **given: Any) -> Any:
        given["for_capture"] = True
        return self._wrapped.prepare_attn(batch, CUDAGraphMode.FULL, *args, **given)


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
            self._step([], nullcontext())
            metrics.cudagraph_metrics = wanted

    def _compare(self, cases: list[Case]) -> str | None:
        if not cases:
            return None
        # The largest batch, with tokens that no case has.
        reference = max(cases, key=lambda case: case.graph_tokens), len(cases)
        untouched = self._run(*reference, eager=True)
        # No replay has been there, so that no fault of a graph can raise the bound.
        noise = self._run(*reference, eager=True).error(untouched)
        bound = min(max(BOUND, NOISE_FACTOR * noise), MAX_BOUND)
        errors: list[float] = []
        layers: list[str | None] = []
        missed = []
        for seed, case in enumerate(cases):
            replayed = self._run(case, seed)
            eager = self._run(case, seed, eager=True)
            used = (str(case.mode), case.graph_tokens)
            if (stat := replayed.stat) and (
                (stat.runtime_mode, stat.num_padded_tokens) != used
            ):
                missed.append(str(case))
            errors.append(replayed.error(eager))
            layers.append(replayed.difference(eager))
        again = self._run(*reference, eager=True)
        damage = again.error(untouched)
        if missed:
            logger.warning("No batch came to the %s: not checked", ", ".join(missed))
        wrong = [
            i
            for i, (error, layer) in enumerate(zip(errors, layers))
            # Rows that differ by rounding come with other bytes in the caches.
            if not error <= bound or (error == 0 and layer is not None)
        ]
        first = self._first_of_all_ranks(wrong[0] if wrong else len(cases))
        self.damaged = not self._first_of_all_ranks(int(damage <= bound))
        if first < len(cases):
            subject = f"The {cases[first]} differs from eager execution"
            error, layer = errors[first], layers[first]
        elif self.damaged:
            subject = f"Eager mode for the {reference[0]} is another one after replays"
            error, layer = damage, again.difference(untouched)
        else:
            logger.info(
                "%d batches are the same by captured graphs and in eager mode: rows "
                "differ by up to %.2g, an eager step run again by %.2g (bound %.2g); "
                "the caches of %d batches are the same to the byte",
                *(len(cases) - len(missed), max(errors), noise, bound),
                layers.count(None),
            )
            return None
        return (
            f"{subject}: on this rank a row is off by {error:.2g} of its norm (bound "
            f"{bound:.2g}); the caches differ first {layer or 'nowhere'}."
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
        limit = self.runner.max_model_len - num_new_tokens - 1
        requests: list[CachedRequest] = []
        for i in range(count):
            context = CONTEXTS[i % len(CONTEXTS)] if i else self._choosing_context()
            context = min(context, limit)
            blocks = self._allocate(context + num_new_tokens)
            if blocks is None:
                break
            tokens = self._tokens(context, seed=i)
            requests.append(CachedRequest(f"_graph_check_{i}", tokens, blocks))
        self._prefill(requests)
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
        """Compute contexts in eager steps of as many tokens as a step may have."""
        after = self._tokens(1, seed=0)
        room = self.runner.max_num_tokens
        step: list[ScheduledRequest] = []
        for request in requests:
            prompt, done = request.token_ids + after, 0
            while done < len(request.token_ids):
                if room == 0:
                    self._step(step, self._without_graphs())
                    step, room = [], self.runner.max_num_tokens
                count = min(len(request.token_ids) - done, room)
                step.append(ScheduledRequest(request, prompt, done, count))
                done, room = done + count, room - count
        if step:
            self._step(step, self._without_graphs())

    def _run(self, case: Case, seed: int, eager: bool = False) -> Outcome:
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
        context = self._eager_twin(case) if eager else nullcontext()
        rows, stat = self._step(scheduled, context, drafts, case.graph_tokens)
        return Outcome(rows, self._written(case), stat)

    def _step(
        self,
        scheduled: list[ScheduledRequest],
        context: AbstractContextManager[None],
        drafts: int = 0,
        graph_tokens: int = 0,
    ) -> tuple[torch.Tensor, CUDAGraphStat | None]:
        """Run one step as the scheduler's; nothing is sampled."""
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
        with context:
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

    def _without_graphs(self) -> AbstractContextManager[None]:
        if self.manager is not None:
            return _replaced(self.manager, _graphs_captured=False)
        dispatcher = self.runner.cudagraph_dispatcher
        return _replaced(dispatcher, cudagraph_mode=CUDAGraphMode.NONE)

    def _eager_twin(self, case: Case) -> AbstractContextManager[None]:
        """Eager steps with the padding and the metadata of a captured one."""
        runner = self.runner
        if case.mode != CUDAGraphMode.FULL:
            return self._without_graphs()  # Its prompts fill the graph.
        if self.manager is not None:
            return _replaced(
                runner,
                cudagraph_manager=EagerManager(self.manager),
                model_state=CapturedState(runner.model_state),
            )
        build = runner._build_attention_metadata
        return _replaced(
            runner,
            model=runner.model.runnable,
            _build_attention_metadata=partial(build, for_cudagraph_capture=True),
        )

    def _first_of_all_ranks(self, index: int) -> int:
        first = torch.tensor(index)
        torch.distributed.all_reduce(
            first, torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group
        )
        return int(first)

    def _written(self, case: Case) -> Digests:
        """Numbers of the blocks that a case's step writes, in the model's order."""
        digests = {}
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
                pages = parts.index_select(dim, index).movedim(dim, 0)
                digests[name] = _digests(pages.flatten(1).contiguous())
        return dict(sorted(digests.items(), key=lambda d: extract_layer_index(d[0])))


def _digests(pages: torch.Tensor) -> torch.Tensor:
    """A number for the bytes of each page, `[num_pages]`: exact, in any order of
    additions, and without a copy of the pages that stays."""
    values = pages.view(torch.uint8).long()
    random = torch.Generator().manual_seed(0)
    weights = torch.randint(1 << 62, values.shape[1:], generator=random)
    return (values * weights.to(values.device)).sum(1)


@contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give an object other attributes for a while."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


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
