# SPDX-License-Identifier: Apache-2.0
"""Model runners with captured graphs, where none can be captured.

What stands for a graph is a list of the weights' addresses, the host's numbers, the
scratch memory and the longest context at the time of the capture; a replay computes
from these, on as many rows as the graph has. The runner's `capture_model` is the real
one, with a small model of three layers and paged caches behind `execute_model`.
"""

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
)

from helpers import layout

BLOCK, BLOCKS, WIDTH, VOCABULARY = 16, 512, 32, 64
SIZES = (1, 2, 4)
PIECES = (8, 48)
"""Tokens of graphs in pieces, where a test has some."""
LAYERS = 3
LONGEST, TOKENS_OF_A_STEP = 512, 96
CHOSEN, RATIO = 64, 4
"""What an indexer chooses of a longer context, and tokens of one of its entries."""
STATE = "model.layers.2.attn.compressor.state"
OTHER_ORDER = 0.02
"""What a row changes by in a batch of another size, or with longer tables: as if an
expert were chosen by a hair."""
FLASH = {
    "model_type": "deepseek_v4",
    "index_topk": CHOSEN,
    "compress_ratios": [0, RATIO, 128],
}


class State(NamedTuple):
    """What a capture keeps: addresses, and numbers of the host."""

    weights: list[torch.Tensor]
    index: torch.Tensor
    scale: float
    state_scale: float
    scratch: torch.Tensor


class Model:
    """Each layer writes its input to the cache, reads what its request has there, and
    multiplies. The second reads of a long context what its index chooses. The last
    writes a state, which later steps alone would read."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, WIDTH)
        self.weights = [torch.randn(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.index = torch.randn(WIDTH)
        self.scale, self.state_scale = [1.0], [1.0]
        self.scratch = torch.zeros(VOCABULARY, WIDTH)
        names = [f"model.layers.{i}.attn" for i in range(LAYERS)]
        # A context that nobody computed is no number.
        shape = BLOCKS, BLOCK, WIDTH
        self.caches = {name: torch.full(shape, torch.nan) for name in names}
        self.state_cache = torch.zeros(BLOCKS, 8, WIDTH)

    def state(self) -> State:
        numbers = self.scale[0], self.state_scale[0]
        return State([*self.weights], self.index, *numbers, self.scratch)

    def run(
        self, state: State, rows: list[tuple[int, int, Any]], padded: int, longest: int
    ) -> torch.Tensor:
        """`rows` are tokens with their positions and their requests' blocks."""
        state.scratch.fill_(1.0)
        x = self.embedding[torch.tensor([token for token, _, _ in rows])]
        for i, (weight, cache) in enumerate(
            zip(state.weights, self.caches.values(), strict=True)
        ):
            seen = []
            for row, (_, position, blocks) in zip(x, rows, strict=True):
                pages = cache[torch.tensor(blocks[0])].flatten(0, 1)
                pages[position] = row
                cache[torch.tensor(blocks[0])] = pages.view(-1, BLOCK, WIDTH)
                read = pages[: position + 1]
                if i == 1 and len(read) > CHOSEN * RATIO:
                    read = read[(read @ state.index).topk(CHOSEN).indices]
                seen.append(read.mean(0))
            x = torch.tanh((x + torch.stack(seen)) @ weight) * state.scale
            x[:, 0] *= 1 + OTHER_ORDER * (padded / 8 + longest / LONGEST)
        for row, (_, position, blocks) in zip(x, rows, strict=True):
            self.state_cache[blocks[1][0], position % 8] = row * state.state_scale
        return x


class Stats(SimpleNamespace):
    """The graph that a step took."""


class Batch(NamedTuple):
    """A step's requests, of whose tokens the metadata hold `padded`."""

    num_reqs: int
    idx_mapping: torch.Tensor
    counts: list[int]
    rows: list[tuple[int, int, Any]]
    padded: int


class Computed(NamedTuple):
    """What `execute_model` leaves; `attn_metadata` are the longest context alone."""

    input_batch: Batch
    attn_metadata: int
    slot_mappings_by_layer: None
    hidden_states: torch.Tensor
    aux_hidden_states: None
    dp_sync_state: None
    cudagraph_stats: Stats | None


Plant = Callable[[Any], None]


class Steps:
    """`execute_model` of either runner, by the smallest graph that fits, or eager."""

    compilation_config: Any
    new = 1
    """Tokens of a decode step: a request's last one, and its drafts."""

    def begin(self) -> None:
        self.model_under_test = Model()
        self.captured: dict[int, State] = {}
        self.replays = self.steps = 0
        self.pieces: tuple[int, ...] = ()
        self.known: dict[str, Any] = {}
        self.execute_model_state: Any = None
        self.max_model_len, self.max_num_tokens = LONGEST, TOKENS_OF_A_STEP
        self.speculator = None
        self.model_config = SimpleNamespace(
            runner_type="generate",
            get_vocab_size=lambda: VOCABULARY,
            hf_text_config=SimpleNamespace(**FLASH),
        )
        layers = {
            name: SimpleNamespace(kv_cache=cache)
            for name, cache in self.model_under_test.caches.items()
        }
        self.vllm_config = SimpleNamespace(
            kv_transfer_config=None,
            speculative_config=None,
            observability_config=SimpleNamespace(cudagraph_metrics=False),
            compilation_config=SimpleNamespace(static_forward_context=layers),
        )
        interface = layout.module("vllm.v1.kv_cache_interface")
        sizes = {"num_kv_heads": 1, "head_size": WIDTH, "dtype": torch.float32}
        self.vllm_config.parallel_config = SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        )
        whole = interface.FullAttentionSpec(block_size=BLOCK, **sizes)
        # State of V4.1's compressor: one block of a request, however long it is.
        ring = interface.CircularBufferSpec(block_size=8, **sizes)
        groups = [
            SimpleNamespace(kv_cache_spec=whole, layer_names=[*layers]),
            SimpleNamespace(kv_cache_spec=ring, layer_names=[STATE]),
        ]
        layers[STATE] = SimpleNamespace(kv_cache=self.model_under_test.state_cache)
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=groups, num_blocks=BLOCKS
        )

    def has_graphs(self) -> bool:
        raise NotImplementedError

    def take_pieces(self, *sizes: int) -> None:
        """Capture graphs in pieces of so many tokens besides."""
        raise NotImplementedError

    def plan(self, tokens: int, longest: int) -> tuple[bool, int, int]:
        """Of a decode step, whether it is a replay, how many rows it has, and what is
        the longest context that its metadata allow."""
        raise NotImplementedError

    def execute_model(self, output: Any, received: Any = None) -> None:
        assert self.execute_model_state is None, "the step before has not ended"
        for request in output.finished_req_ids:
            self.known.pop(request)
        self.known |= {new.req_id: new for new in output.scheduled_new_reqs}
        assert all(len(new.block_ids[1]) == 1 for new in output.scheduled_new_reqs)
        rows = []
        for name, count in output.num_scheduled_tokens.items():
            new = self.known[name]
            first = new.num_computed_tokens
            rows += [
                (new.prompt_token_ids[i], i, new.block_ids)
                for i in range(first, first + count)
            ]
        if not rows:
            return
        assert len(rows) <= self.max_num_tokens
        longest = max(position for _, position, _ in rows)
        padded, mode = len(rows), CUDAGraphMode.NONE
        counts = [*output.num_scheduled_tokens.values()]
        assert output.total_num_scheduled_tokens == len(rows)
        drafts = output.scheduled_spec_decode_tokens
        assert all(len(tokens) == self.new - 1 > 0 for tokens in drafts.values())
        # A prompt may end in a chunk of as many tokens.
        decodes = self.new == 1 or len(drafts) == len(counts)
        if decodes and all(n == self.new for n in counts):
            replays, padded, longest = self.plan(padded, longest)
            # A graph was captured with the tables of the longest context.
            if replays:
                mode, longest = CUDAGraphMode.FULL, LONGEST
        elif self.has_graphs() and padded <= max(self.pieces, default=0):
            mode = CUDAGraphMode.PIECEWISE
            padded = min(n for n in self.pieces if n >= padded)
        self.steps += 1
        replays = mode != CUDAGraphMode.NONE
        self.replays += replays
        model = self.model_under_test
        state = self.captured[padded] if replays else model.state()
        stats = None
        if self.vllm_config.observability_config.cudagraph_metrics:
            stats = Stats(runtime_mode=str(mode), num_padded_tokens=padded)
        computed = model.run(state, rows, padded, longest)
        batch = Batch(len(counts), torch.arange(len(counts)), counts, rows, padded)
        self.execute_model_state = Computed(
            batch, longest, None, computed, None, None, stats
        )


class FirstSteps(Steps):
    """As the first runner plans a step: the dispatcher chooses, the model replays."""

    def begin(self) -> None:
        super().begin()
        self.cudagraph_dispatcher = SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL,
            get_capture_descs=lambda: [*DESCS.items()],
        )
        self.model = SimpleNamespace(replays=True, runnable=object())

    def has_graphs(self) -> bool:
        return bool(self.cudagraph_dispatcher.cudagraph_mode == CUDAGraphMode.FULL)

    def take_pieces(self, *sizes: int) -> None:
        self.pieces = sizes
        descs = [*DESCS.items(), (CUDAGraphMode.PIECEWISE, [*map(descriptor, sizes)])]
        self.cudagraph_dispatcher.get_capture_descs = lambda: descs

    def _build_attention_metadata(
        self, longest: int, for_cudagraph_capture: bool = False
    ) -> int:
        return LONGEST if for_cudagraph_capture else longest

    def plan(self, tokens: int, longest: int) -> tuple[bool, int, int]:
        size = size_of(tokens) if self.has_graphs() else None
        longest = self._build_attention_metadata(longest)
        replays = size is not None and hasattr(self.model, "replays")
        return replays, size or tokens, longest


class SecondSteps(Steps):
    """As the second runner: the manager chooses, the model's state pads."""

    def begin(self) -> None:
        super().begin()
        self.cudagraph_manager = Manager(SIZES, self.new)
        self.model_state = ModelState()

    def has_graphs(self) -> bool:
        return self.cudagraph_manager._graphs_captured

    def take_pieces(self, *sizes: int) -> None:
        self.pieces = sizes
        descs = [*map(descriptor, sizes)]
        self.cudagraph_manager._capture_descs[CUDAGraphMode.PIECEWISE] = descs

    def plan(self, tokens: int, longest: int) -> tuple[bool, int, int]:
        requests = tokens // self.new
        desc = self.cudagraph_manager.dispatch(requests, tokens, self.new, 0)
        longest = self.model_state.prepare_attn(longest, desc.cg_mode)
        replays = desc.cg_mode == CUDAGraphMode.FULL
        return replays, desc.num_tokens, longest


class Manager(CudaGraphManager):
    """Of graphs for some numbers of requests, each of which has `new` tokens."""

    def __init__(self, sizes: tuple[int, ...], new: int) -> None:
        full = CUDAGraphMode.FULL
        descs = [BatchExecutionDescriptor(full, n * new, n, new) for n in sizes]
        self._capture_descs, self._graphs_captured = {full: descs}, True
        self.graphs: dict[Any, Any] = dict.fromkeys(descs)

    def dispatch(self, reqs: int, tokens: int, *given: Any, **named: Any) -> Any:
        for desc in self._capture_descs[CUDAGraphMode.FULL]:
            if self._graphs_captured and desc.num_tokens >= tokens:
                return desc
        return BatchExecutionDescriptor(CUDAGraphMode.NONE, tokens, None)


class ModelState:
    """Metadata for the longest of a batch, or for any at capture."""

    def prepare_attn(
        self, longest: int, mode: CUDAGraphMode, for_capture: bool = False
    ) -> int:
        assert not for_capture or mode == CUDAGraphMode.FULL
        return LONGEST if for_capture else longest


def size_of(tokens: int) -> int | None:
    return min((size for size in SIZES if size >= tokens), default=None)


def descriptor(size: int) -> Any:
    return SimpleNamespace(num_tokens=size, num_reqs=size, num_active_loras=0)


DESCS = {CUDAGraphMode.FULL: [descriptor(n) for n in SIZES]}


def make(
    version: int,
    plant: Plant | None,
    patch: pytest.MonkeyPatch,
    drafts: Any = None,
) -> Any:
    """A runner whose `capture_model` is XPU's, around the stand-in of a capture, with
    the speculator that `drafts` makes of it."""
    from vllm.v1.worker import xpu_model_runner as module

    real: Any = (module.XPUModelRunner, module.XPUModelRunnerV2)[version - 1]
    steps = (FirstSteps, SecondSteps)[version - 1]

    def capture_model(self: Any, **_: Any) -> int:
        sizes = [*self.pieces, *(n * self.new for n in SIZES)]
        self.captured = {n: self.model_under_test.state() for n in sizes}
        if self.speculator is not None:
            self.speculator.capture()
        if plant is not None:
            plant(self.speculator or self.model_under_test)
        return 1

    patch.setattr(real.__mro__[1], "capture_model", capture_model)

    class Runner(steps, real):  # type: ignore[misc, valid-type]
        new = drafts.new if drafts else 1

        def __init__(self) -> None:
            self.begin()
            self.speculator = drafts and drafts(self)

    return Runner()


class Warmed:
    """What stands for vLLM's worker: it captures at the end of its warm-up."""

    def __init__(self, runner: Any) -> None:
        self.model_runner = runner
        self.model_config = SimpleNamespace(enforce_eager=False)

    def compile_or_warm_up_model(self) -> int:
        captured: int = self.model_runner.capture_model()
        return captured


def start(runner: Any) -> int:
    """The end of a worker's start, with the check that the wheel has, if it has one."""
    kinds: tuple[type, ...] = (Warmed,)
    if importlib.util.find_spec("vllm_xpu_dsv4"):
        kinds = (layout.module("vllm_xpu_dsv4.worker").ChecksGraphs, Warmed)
    worker: Any = type("Worker", kinds, {})(runner)
    captured: int = worker.compile_or_warm_up_model()
    return captured


def stale_pointer(model: Model) -> None:
    old = model.weights[1]
    model.weights[1] = old.clone()
    old.normal_()


def host_value(model: Model) -> None:
    model.scale[0] = 1.5


def small_number(model: Model) -> None:
    """What rows of batches of two sizes are apart would hide it."""
    model.scale[0] = 1.002


def moved_index(model: Model) -> None:
    """Wrong where the indexer has more than it chooses."""
    old, model.index = model.index, model.index.clone()
    old.normal_()


def other_state(model: Model) -> None:
    """Wrong in the steps that will read what this one wrote."""
    model.state_scale[0] = 1.5


def moved_scratch(model: Model) -> None:
    """Both modes compute the same, and wrong, once a replay has been there."""
    old, model.scratch = model.scratch, torch.zeros_like(model.scratch)
    model.embedding = old.copy_(model.embedding)
