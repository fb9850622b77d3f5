# SPDX-License-Identifier: Apache-2.0
"""The compressor of ratio 128 launches only where a token ends a block of 128."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import (
    batch_metadata,
    kernel_trace,
    layout,
    model_configs,
    model_layers,
    pin_ops,
)

OP = "fused_kv_compress_norm_rope_insert_sparse_attn"
RATIO, HEAD, ROPE = 128, 512, 64
STATE_BLOCK = 8
PAGE_TOKENS, PAGE_BYTES = 2, 584
REQUESTS = 2
# Two requests that end no block of 128, one token before the first of them does.
SHORT = ((127, 200), (127, 72))
FIRST_END = ((128, 201), (1, 1))


class Run:
    """A compressor of ratio 128, its caches, and what its batches launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        self.monkeypatch = monkeypatch
        self.config = model_configs.vllm_config()
        self.compressor = model_layers.compressor(
            self.config, indexer=False, ratio=RATIO
        )
        device = layout.device()
        self.compressor.norm.weight.data = torch.rand(HEAD, device=device) + 0.5
        self.compressor.ape.data = torch.randn(RATIO, HEAD, device=device)
        cache = self.compressor.state_cache
        spec = cache.get_kv_cache_spec(self.config)
        with model_configs.current(self.config):
            self.builder = cache.get_attn_backend().get_builder_cls()(
                spec, [cache.prefix], self.config, torch.device(device)
            )
        blocks = REQUESTS * layout.MAX_MODEL_LEN // STATE_BLOCK + 1
        cache.kv_cache = torch.full(
            (blocks, STATE_BLOCK, 2 * HEAD), torch.nan, device=device
        )
        self.page = torch.zeros(
            REQUESTS, PAGE_TOKENS, PAGE_BYTES, dtype=torch.uint8, device=device
        )
        context = self.config.compilation_config.static_forward_context
        context[self.compressor.k_cache_prefix].kv_cache = self.page
        self.scores = torch.randn(REQUESTS, 2 * RATIO, 2 * HEAD)
        angle = torch.rand(2 * RATIO, ROPE // 2) * 6.3
        table = torch.cat((angle.cos(), angle.sin()), -1)
        self.rotary = SimpleNamespace(cos_sin_cache=table.to(device))

    def metadata(self, seq_lens: Sequence[int], query_lens: Sequence[int]) -> Any:
        """What the release's own builder makes of this batch."""
        common = batch_metadata.common_metadata(seq_lens, query_lens, STATE_BLOCK)
        return self.builder.build(0, common)

    def step(
        self,
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        metadata: Any = None,
        **options: Any,
    ) -> list[str]:
        """Run one batch; the names of the op and the kernels that compress."""
        from vllm.forward_context import set_forward_context

        device, compressor = layout.device(), self.compressor
        spans = [
            torch.arange(total - new, total)
            for total, new in zip(seq_lens, query_lens, strict=True)
        ]
        owner = torch.repeat_interleave(
            torch.arange(REQUESTS), torch.tensor(query_lens)
        )
        positions = torch.cat(spans)
        slots = owner * PAGE_TOKENS + positions // RATIO
        entries = {
            compressor.state_cache.prefix: metadata
            or self.metadata(seq_lens, query_lens),
            compressor.k_cache_prefix: SimpleNamespace(slot_mapping=slots.to(device)),
        }
        rows = self.scores[owner, positions].to(device)
        with ExitStack() as stack:
            stack.enter_context(model_configs.current(self.config))
            stack.enter_context(layout.worker())
            stack.enter_context(set_forward_context(entries, self.config, **options))
            trace = stack.enter_context(kernel_trace.traced(self.monkeypatch))
            calls = stack.enter_context(pin_ops.recorded(self.monkeypatch, OP))
            compressor(rows, positions.to(device), self.rotary)
        return calls + [name for name in trace.launches if "compress" in name]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_a_batch_that_ends_no_block_launches_no_compressor(run: Run) -> None:
    for batch in (SHORT, ((126, 127), (1, 1))):
        launched = run.step(*batch)
        assert not launched, f"launched {launched}"


def test_entries_are_the_same_with_and_without_the_steps_between(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next entry is compressed from what the skipped batches saved."""
    skipped = run.step(*SHORT)
    assert run.step(*FIRST_END)
    whole = Run(monkeypatch)
    assert whole.step((128, 201), (128, 73))
    assert torch.equal(run.page, whole.page)
    assert run.page[0, 0].any() and not run.page[1].any()
    assert not skipped, f"launched {skipped}"


@pytest.mark.unchanged
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [
        pytest.param((128, 5), (1, 5), id="decode"),
        pytest.param((3, 256), (3, 256), id="prefill"),
        pytest.param((130, 5), (4, 5), id="inside-a-chunk"),
    ],
)
def test_a_batch_that_ends_a_block_launches_the_compressor(
    run: Run, seq_lens: tuple[int, ...], query_lens: tuple[int, ...]
) -> None:
    assert run.step(seq_lens, query_lens)


@pytest.mark.unchanged
def test_a_captured_graph_holds_the_compressor(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph is replayed for batches that do end a block."""
    monkeypatch.setattr(torch.xpu, "is_current_stream_capturing", lambda: True)
    assert run.step(*SHORT)


@pytest.mark.unchanged
def test_a_batch_of_unknown_lengths_launches_the_compressor(run: Run) -> None:
    metadata = run.metadata(*SHORT)
    metadata.c128_boundary = None
    assert run.step(*SHORT, metadata)


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_rocm_launches_the_compressor(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = layout.module(layout.COMPRESSOR)
    rocm = layout.another_platform(module.current_platform, rocm=True)
    monkeypatch.setattr(module, "current_platform", rocm)
    assert run.step(*SHORT)
