# SPDX-License-Identifier: Apache-2.0
"""Captured graphs are compared with eager execution at start, for either runner.

No graph can be captured on a CPU. What stands for one here is a list of the weights'
addresses, the host's numbers and the scratch memory at the time of the capture; a
replay computes from these. The runner's `capture_model` is the real one, with a small
model of three layers and paged caches behind `execute_model`.
"""

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout, model_configs
from vllm.config import CUDAGraphMode, VllmConfig

BLOCK, BLOCKS, WIDTH, VOCABULARY = 16, 512, 32, 64
SIZES = (1, 2, 4)
LAYERS = 3
LOGGER = "vllm.v1.worker.xpu_graph_check"
STATE = "model.layers.2.attn.compressor.state"


State = tuple[list[torch.Tensor], float, torch.Tensor]


class Model:
    """Each layer writes its input to the cache, reads what its request has there, and
    multiplies."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, WIDTH)
        self.weights = [torch.randn(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.scale = [1.0]
        self.scratch = torch.zeros(VOCABULARY, WIDTH)
        names = [f"model.layers.{i}.attn" for i in range(LAYERS)]
        self.caches = {name: torch.zeros(BLOCKS, BLOCK, WIDTH) for name in names}

    def state(self) -> State:
        """What a capture keeps: addresses, and numbers of the host."""
        return [*self.weights], self.scale[0], self.scratch

    def run(self, state: State, rows: list[tuple[int, int, list[int]]]) -> torch.Tensor:
        """`rows` are tokens with their positions and their requests' blocks."""
        weights, scale, scratch = state
        scratch.fill_(1.0)
        x = self.embedding[torch.tensor([token for token, _, _ in rows])]
        for weight, cache in zip(weights, self.caches.values(), strict=True):
            seen = []
            for row, (_, position, blocks) in zip(x, rows, strict=True):
                pages = cache[torch.tensor(blocks)].flatten(0, 1)
                pages[position] = row
                cache[torch.tensor(blocks)] = pages.view(-1, BLOCK, WIDTH)
                seen.append(pages[: position + 1].mean(0))
            x = torch.tanh((x + torch.stack(seen)) @ weight) * scale
        return x


class Stats(SimpleNamespace):
    """The graph that a step took."""


Plant = Callable[[Model], None]


class Steps:
    """`execute_model` of either runner, by the smallest graph that fits, or eager."""

    compilation_config: Any

    def begin(self) -> None:
        self.model_under_test = Model()
        self.captured: dict[int, Any] = {}
        self.replays = self.steps = 0
        self.known: dict[str, Any] = {}
        self.execute_model_state: Any = None
        self.max_model_len, self.max_num_tokens = 128, 64
        self.speculator = None
        self.model_config = SimpleNamespace(
            runner_type="generate", get_vocab_size=lambda: VOCABULARY
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
        layers[STATE] = SimpleNamespace(kv_cache=torch.zeros(BLOCKS, 8, WIDTH))
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=groups, num_blocks=BLOCKS
        )

    def has_graphs(self) -> bool:
        raise NotImplementedError

    def graph_of(self, requests: int) -> int | None:
        fitting = [size for size in SIZES if size >= requests and self.has_graphs()]
        return min(fitting, default=None)

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
                (new.prompt_token_ids[i], i, new.block_ids[0])
                for i in range(first, first + count)
            ]
        if not rows:
            return
        decodes = all(n == 1 for n in output.num_scheduled_tokens.values())
        size = self.graph_of(len(rows)) if decodes else None
        self.steps += 1
        self.replays += size is not None
        state = self.captured[size] if size else self.model_under_test.state()
        stats = Stats(
            runtime_mode=str(CUDAGraphMode.FULL if size else CUDAGraphMode.NONE),
            num_padded_tokens=size or len(rows),
        )
        self.execute_model_state = SimpleNamespace(
            hidden_states=self.model_under_test.run(state, rows), cudagraph_stats=stats
        )


def descriptor(size: int) -> Any:
    return SimpleNamespace(num_tokens=size, num_reqs=size, num_active_loras=0)


def make(version: int, plant: Plant | None, patch: pytest.MonkeyPatch) -> Any:
    """A runner whose `capture_model` is XPU's, around the stand-in of a capture."""
    from vllm.v1.worker import xpu_model_runner as module

    real: Any = (module.XPUModelRunner, module.XPUModelRunnerV2)[version - 1]
    descs = {CUDAGraphMode.FULL: [descriptor(n) for n in SIZES]}

    def capture_model(self: Any, **_: Any) -> int:
        self.captured = {n: self.model_under_test.state() for n in SIZES}
        if plant is not None:
            plant(self.model_under_test)
        return 1

    patch.setattr(real.__mro__[1], "capture_model", capture_model)

    class Runner(Steps, real):  # type: ignore[misc]
        def __init__(self) -> None:
            self.begin()
            if version == 1:
                self.cudagraph_dispatcher = SimpleNamespace(
                    cudagraph_mode=CUDAGraphMode.FULL,
                    get_capture_descs=lambda: [*descs.items()],
                )
            else:
                self.cudagraph_manager = SimpleNamespace(
                    _capture_descs=descs, _graphs_captured=True, graphs={}
                )

        def has_graphs(self) -> bool:
            if version == 1:
                return self.cudagraph_dispatcher.cudagraph_mode == CUDAGraphMode.FULL
            return bool(self.cudagraph_manager._graphs_captured)

    return Runner()


def stale_pointer(model: Model) -> None:
    old = model.weights[1]
    model.weights[1] = old.clone()
    old.normal_()


def host_value(model: Model) -> None:
    model.scale[0] = 1.5


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
    assert "lies after the input, up to model.layers.0" in str(raised.value)


def test_rows_of_zeros_agree() -> None:
    error = layout.module(LOGGER)._row_error
    rows = torch.zeros(2, 3)
    assert error(rows, rows) == 0.0
    assert error(rows + 1, rows) > 1e30
    assert error(rows * float("nan"), rows) > 1e30


@pytest.mark.unchanged
@pytest.mark.parametrize("version", [1, 2])
def test_nothing_runs_where_it_is_off(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_XPU_GRAPH_CHECK", "off")
    runner = make(version, stale_pointer, monkeypatch)
    assert runner.capture_model() == 1
    assert runner.has_graphs() and runner.steps == 0
