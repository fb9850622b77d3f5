# SPDX-License-Identifier: Apache-2.0
"""Captured graphs are compared with eager execution at start, for either runner.

No graph can be captured on a CPU. What stands for one here is a list of the weights'
addresses, the host's numbers, the scratch memory and the longest context at the time of
the capture; a replay computes from these, on as many rows as the graph has. The
runner's `capture_model` is the real one, with a small model of three layers and paged
caches behind `execute_model`.
"""

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from helpers import layout, model_configs
from vllm.config import CUDAGraphMode, VllmConfig

BLOCK, BLOCKS, WIDTH, VOCABULARY = 16, 512, 32, 64
SIZES = (1, 2, 4)
LAYERS = 3
LONGEST, TOKENS_OF_A_STEP = 512, 96
CHOSEN, RATIO = 64, 4
"""What an indexer chooses of a longer context, and tokens of one of its entries."""
LOGGER = "vllm.v1.worker.xpu_graph_check"
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
        self.caches = {name: torch.zeros(BLOCKS, BLOCK, WIDTH) for name in names}
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


Plant = Callable[[Model], None]


class Steps:
    """`execute_model` of either runner, by the smallest graph that fits, or eager."""

    compilation_config: Any

    def begin(self) -> None:
        self.model_under_test = Model()
        self.captured: dict[int, State] = {}
        self.replays = self.steps = 0
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

    def plan(self, tokens: int, longest: int) -> tuple[bool, int, int]:
        """Of a decode step, whether it is a replay, how many rows it has, and what is
        the longest context that its metadata allow."""
        raise NotImplementedError

    def execute_model(self, output: Any, received: Any = None) -> None:
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
        replays, padded = False, len(rows)
        # A prompt may end in a chunk of one token.
        if all(n == 1 for n in output.num_scheduled_tokens.values()):
            replays, padded, longest = self.plan(padded, longest)
        self.steps += 1
        self.replays += replays
        # A graph was captured with the tables of the longest context.
        longest = LONGEST if replays else longest
        model = self.model_under_test
        state = self.captured[padded] if replays else model.state()
        stats = Stats(
            runtime_mode=str(CUDAGraphMode.FULL if replays else CUDAGraphMode.NONE),
            num_padded_tokens=padded,
        )
        self.execute_model_state = SimpleNamespace(
            hidden_states=model.run(state, rows, padded, longest),
            cudagraph_stats=stats,
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
        self.cudagraph_manager = Manager()
        self.model_state = ModelState()

    def has_graphs(self) -> bool:
        return self.cudagraph_manager._graphs_captured

    def plan(self, tokens: int, longest: int) -> tuple[bool, int, int]:
        desc = self.cudagraph_manager.dispatch(tokens, tokens, 1, 0, max_query_len=1)
        longest = self.model_state.prepare_attn(longest, desc.cg_mode)
        replays = desc.cg_mode == CUDAGraphMode.FULL
        return replays, desc.num_tokens, longest


class Manager:
    """Of the graphs of `SIZES`."""

    def __init__(self) -> None:
        self._capture_descs, self._graphs_captured = DESCS, True
        self.graphs: dict[Any, Any] = {}

    def dispatch(self, reqs: int, tokens: int, *given: Any, **named: Any) -> Any:
        utilities = layout.module("vllm.v1.worker.gpu.cudagraph_utils")
        size = size_of(tokens) if self._graphs_captured else None
        mode = CUDAGraphMode.FULL if size else CUDAGraphMode.NONE
        return utilities.BatchExecutionDescriptor(mode, size or tokens, size or reqs)


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


def make(version: int, plant: Plant | None, patch: pytest.MonkeyPatch) -> Any:
    """A runner whose `capture_model` is XPU's, around the stand-in of a capture."""
    from vllm.v1.worker import xpu_model_runner as module

    real: Any = (module.XPUModelRunner, module.XPUModelRunnerV2)[version - 1]
    steps = (FirstSteps, SecondSteps)[version - 1]

    def capture_model(self: Any, **_: Any) -> int:
        self.captured = {n: self.model_under_test.state() for n in SIZES}
        if plant is not None:
            plant(self.model_under_test)
        return 1

    patch.setattr(real.__mro__[1], "capture_model", capture_model)

    class Runner(steps, real):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.begin()

    return Runner()


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


@pytest.fixture
def said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """What the check logs, in a world of one rank."""
    logger = logging.getLogger(LOGGER)
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO)
    with model_configs.current(VllmConfig()):
        yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "plant, words",
    [
        (
            stale_pointer,
            "graph of 1 tokens|after model.layers.1.attn, up to model.layers.2",
        ),
        (
            host_value,
            "graph of 1 tokens|after model.layers.0.attn, up to model.layers.1",
        ),
        (small_number, "graph of 1 tokens|up to model.layers.1"),
        (moved_index, "graph of 1 tokens|up to model.layers.2"),
        (other_state, f"graph of 1 tokens|off by 0 of its norm|up to {STATE}"),
    ],
)
def test_a_graph_that_differs_is_named_and_dropped(
    version: int,
    plant: Plant,
    words: str,
    said: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make(version, plant, monkeypatch)
    assert runner.capture_model() == 1
    assert not runner.has_graphs(), "the graph that differs is still there"
    for part in words.split("|"):
        assert part in said.text


@pytest.mark.parametrize("version", [1, 2])
def test_graphs_that_agree_stay(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(version, None, monkeypatch)
    assert runner.capture_model() == 1
    assert runner.replays == 2 * len(SIZES), "no graph was compared"
    assert runner.has_graphs()
    assert "6 batches are the same" in said.text
    assert not any(r.levelno >= logging.WARNING for r in said.records)


@pytest.mark.parametrize("version", [1, 2])
def test_the_start_ends_if_it_must(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_XPU_GRAPH_CHECK", "stop")
    runner = make(version, stale_pointer, monkeypatch)
    with pytest.raises(RuntimeError, match=r"graph of 1 tokens .* differs"):
        runner.capture_model()


@pytest.mark.parametrize("version", [1, 2])
def test_no_mode_serves_from_memory_that_replays_wrote_to(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(version, moved_scratch, monkeypatch)
    with pytest.raises(RuntimeError, match="Start with --enforce-eager") as raised:
        runner.capture_model()
    assert "first after the input, up to model.layers.0" in str(raised.value)


def other_rank(patch: pytest.MonkeyPatch, first: int, same: int) -> None:
    """A second rank, whose first case that differs is `first`, and whose eager step
    after the replays is the one before them (`same`) or not."""
    verdicts = iter([first, same])

    def all_reduce(tensor: torch.Tensor, op: Any, group: Any) -> None:
        assert op == torch.distributed.ReduceOp.MIN
        tensor.clamp_(max=next(verdicts))

    patch.setattr(torch.distributed, "all_reduce", all_reduce)


@pytest.mark.parametrize("version", [1, 2])
def test_a_graph_that_differs_on_another_rank_is_dropped_here_too(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of which one replays and one does not would wait for each other."""
    runner = make(version, None, monkeypatch)
    other_rank(monkeypatch, first=2, same=1)
    assert runner.capture_model() == 1
    assert not runner.has_graphs(), "this rank went by its own verdict"
    assert "graph of 2 tokens" in said.text


@pytest.mark.parametrize("version", [1, 2])
def test_every_rank_ends_where_one_has_damaged_memory(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make(version, None, monkeypatch)
    other_rank(monkeypatch, first=2 * len(SIZES), same=0)
    with pytest.raises(RuntimeError, match="Start with --enforce-eager"):
        runner.capture_model()


def outcome(rows: torch.Tensor) -> Any:
    return layout.module(LOGGER).Outcome(rows, {}, None)


def test_rows_of_zeros_agree() -> None:
    rows = torch.zeros(2, 3)
    assert outcome(rows).error(outcome(rows)) == 0.0
    assert outcome(rows + 1).error(outcome(rows)) > 1e30
    assert outcome(rows * float("nan")).error(outcome(rows)) > 1e30


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_every_byte_of_a_page_counts(dtype: torch.dtype) -> None:
    digests = layout.module(LOGGER)._digests
    pages = torch.arange(3 * 64, dtype=torch.uint8).view(3, 64)
    expected = digests(pages.view(dtype))
    for place in (0, 17, 63):
        other = pages.clone()
        other[1, place] += 1
        assert (digests(other.view(dtype)) != expected).tolist() == [False, True, False]
    swapped = pages.flip(1).contiguous()
    assert not (digests(swapped.view(dtype)) == expected).any()


@pytest.mark.parametrize("version", [1, 2])
def test_eager_steps_that_differ_from_themselves_are_said(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of some ops come in another order each time."""
    runner = make(version, None, monkeypatch)
    compute = runner.model_under_test.run
    noise = torch.Generator().manual_seed(0)

    def computed(*given: Any) -> torch.Tensor:
        rows: torch.Tensor = compute(*given)
        return rows + 1e-2 * torch.rand(rows.shape, generator=noise)

    runner.model_under_test.run = computed
    runner.capture_model()
    assert runner.has_graphs()
    assert "an eager step run again by 0.0" in said.text


@pytest.mark.unchanged
@pytest.mark.parametrize("version", [1, 2])
def test_nothing_runs_where_it_is_off(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_XPU_GRAPH_CHECK", "off")
    runner = make(version, stale_pointer, monkeypatch)
    assert runner.capture_model() == 1
    assert runner.has_graphs() and runner.steps == 0


class Recurrent(layout.module("vllm.model_executor.layers.mamba.abstract").MambaBase):  # type: ignore[misc]
    """A layer whose caches vLLM itself binds: a tuple of states."""

    def get_state_shape(self) -> Any:
        return ((4, 8), (2, 4, 4))

    def get_state_dtype(self) -> Any:
        return (torch.float32, torch.float32)

    @property
    def mamba_type(self) -> str:
        return "mamba2"


@pytest.mark.unchanged
@pytest.mark.parametrize("version", [1, 2])
def test_a_hybrid_model_starts(
    version: int, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of attention and recurrent layers, whose state each step moves on."""
    runner = make(version, None, monkeypatch)
    runner.model_config.hf_text_config = SimpleNamespace(model_type="qwen3_next")
    interface = layout.module("vllm.v1.kv_cache_interface")
    layer = Recurrent()
    spec = interface.MambaSpec(
        shapes=layer.get_state_shape(), dtypes=layer.get_state_dtype(), block_size=BLOCK
    )
    pages = torch.zeros(BLOCKS, 1, 1, spec.page_size_bytes, dtype=torch.int8)
    layer.bind_kv_cache(pages)
    name = "model.layers.1.linear_attn"
    runner.vllm_config.compilation_config.static_forward_context[name] = layer
    runner.vllm_config.cache_config = SimpleNamespace(mamba_cache_mode="none")
    runner.kv_cache_config.kv_cache_groups.append(
        SimpleNamespace(kv_cache_spec=spec, layer_names=[name])
    )
    assert runner.capture_model() == 1
    assert runner.has_graphs() and runner.steps == 0
