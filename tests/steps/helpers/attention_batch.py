# SPDX-License-Identifier: Apache-2.0
"""A batch for a real XPU attention layer, and its expected output."""

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from . import batch_metadata, layer_parts, layout, model_configs, model_layers
from . import reference_attention as reference

RATIOS = (0, 4, 128)
SCALE = reference.HEAD_DIM**-0.5
NO_SINKS = torch.full((layout.HEADS,), -torch.inf)


def random_sinks(heads: int = layout.HEADS) -> torch.Tensor:
    """One sink per head from N(0, 2)."""
    return 2 * torch.randn(heads, generator=torch.Generator().manual_seed(7))


class Batch:
    """Requests with random pages and queries, and the metadata that vLLM's own
    builders make of them.

    Args:
        ratio: the layer's kind: 0 (window only), 4 or 128.
        seq_lens: tokens of each request, the new ones included; decodes first.
        query_lens: new tokens of each request.
        sinks: `[heads]`, natural-log units; their number is that of the heads.
        speculative_tokens: draft tokens that still count as a decode.
        padded: this many last tokens are padding: they have no slot and see nothing.
        block_size: tokens per page of the layer's own cache.
        attend: gives the layer's attention function; `layer_parts.attend` takes only
            the layer's own.
        build: makes the layer from a `VllmConfig` and the ratio.
        quantized: whether its linear layers take FP8 weights in blocks.
        images: of a request, the positions of the first and the last token of each
            image; the model is V4 Vision if there is any.
    """

    def __init__(
        self,
        ratio: int,
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        *,
        sinks: torch.Tensor,
        speculative_tokens: int = 0,
        padded: int = 0,
        block_size: int = layout.BLOCK_SIZE,
        attend: Callable[[Any], Any] = layer_parts.unwired,
        build: Callable[[Any, int], Any] = model_layers.attention_layer,
        quantized: bool = False,
        images: dict[int, list[tuple[int, int]]] | None = None,
    ) -> None:
        self.ratio, self.seq_lens, self.query_lens = ratio, seq_lens, query_lens
        self.padded, self.images = padded, images or {}
        self.config = model_configs.vllm_config(
            speculative_tokens=speculative_tokens,
            quantized=quantized,
            heads=len(sinks),
            block_size=block_size,
        )
        if images:
            model_configs.take_images(self.config)
        self.whole = build(self.config, ratio)
        self.layer = layer_parts.attending(self.whole)
        self.attend = attend(self.whole)
        self.generator = torch.Generator().manual_seed(ratio)
        with torch.no_grad():
            self.layer.attn_sink[: len(sinks)] = sinks
        self.metadata: dict[str, Any] = {}
        self._window()
        if ratio:
            self._compressed()
        shape = (sum(query_lens), len(sinks), reference.HEAD_DIM)
        queries = torch.randn(shape, generator=self.generator)
        self.queries = queries.to(torch.bfloat16).to(layout.device())

    def _window(self) -> None:
        cache = self.layer.swa_cache_layer
        spec = cache.get_kv_cache_spec(self.config)
        self.window_pages, self.window_table = self._pages(spec, spec.block_size)
        cache.kv_cache = self.window_pages.to(layout.device())
        builder = cache.get_attn_backend().get_builder_cls()
        self.metadata[cache.prefix] = self._build(builder, spec, cache.prefix)

    def _compressed(self) -> None:
        layer = self.layer
        spec = layer.get_kv_cache_spec(self.config)
        entries = spec.block_size // self.ratio
        self.pages, self.table = self._pages(spec, entries)
        layer.kv_cache = self.pages.to(layout.device())
        builder = layer.get_attn_backend().get_builder_cls()
        self.metadata[layer.prefix] = self._build(builder, spec, layer.prefix)
        self.chosen = torch.full_like(layer.topk_indices_buffer, -1)
        for row, position in enumerate(self.positions()):
            visible = (position + 1) // self.ratio
            order = torch.randperm(visible, generator=self.generator)
            picked = order[: self.chosen.shape[1]]
            self.chosen[row, : len(picked)] = picked
        layer.topk_indices_buffer.copy_(self.chosen)

    def _pages(self, spec: Any, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        table = self._common(spec).block_table_tensor.cpu()
        pages = reference.random_pages(
            int(table.max()) + 1, block_size, spec.page_size_bytes, self.generator
        )
        return pages, table

    def _common(self, spec: Any) -> Any:
        common = batch_metadata.common_metadata(
            self.seq_lens, self.query_lens, block_size=spec.block_size
        )
        if self.padded:
            common.slot_mapping[-self.padded :] = -1
        if self.images:
            common.mm_req_doc_ranges = self.images
        return common

    def _build(self, builder: Any, spec: Any, prefix: str) -> Any:
        device = torch.device(layout.device())
        with model_configs.current(self.config):
            made = builder(spec, [prefix], self.config, device)
            return made.build(0, self._common(spec))

    def positions(self) -> list[int]:
        """The position of each new token in its request."""
        return [
            position
            for total, new in zip(self.seq_lens, self.query_lens, strict=True)
            for position in range(total - new, total)
        ]

    @contextmanager
    def ready(self) -> Iterator[Callable[[], torch.Tensor]]:
        """A call of `forward_mqa` on the batch, after the warm-up that reserves memory
        and the lock that forbids more of it."""
        from vllm.forward_context import create_forward_context as create
        from vllm.forward_context import override_forward_context as override

        token = torch.empty_like(self.queries[:1])
        queries = self.queries
        output = torch.full(queries.shape, torch.nan, dtype=queries.dtype).to(queries)
        positions = torch.tensor(self.positions(), device=queries.device)
        workspace = layout.workspace()
        with override(create(None, self.config)):
            self.attend(token, token, positions[:1], torch.empty_like(token))
        workspace.lock()

        def run() -> torch.Tensor:
            self.attend(queries, queries, positions, output)
            return output

        with override(create(self.metadata, self.config)):
            yield run

    def forward(self) -> torch.Tensor:
        """The output of `forward_mqa`, `[tokens, heads, 512]` bf16."""
        with self.ready() as run:
            return run()

    def expected(self, sinks: torch.Tensor) -> torch.Tensor:
        """The expected output of `forward` with these sinks, float64 on the host."""
        owners = [
            request for request, new in enumerate(self.query_lens) for _ in range(new)
        ]
        rows = zip(owners, self.positions(), self.queries.cpu(), strict=True)
        tokens = len(owners) - self.padded
        return torch.stack(
            [
                reference.attend(
                    query,
                    self.keys(token, request, position)
                    if token < tokens
                    else query.new_empty(0, reference.HEAD_DIM),
                    sinks,
                    SCALE,
                )
                for token, (request, position, query) in enumerate(rows)
            ]
        )

    def keys(self, token: int, request: int, position: int) -> torch.Tensor:
        """All keys that a token attends to: its window, then its compressed entries."""
        first, last = max(position + 1 - layout.WINDOW, 0), position
        for start, end in self.images.get(request, []):
            if start <= position <= end:
                first, last = min(first, start), end
        table = self.window_table[request]
        found = [reference.gather(self.window_pages, table, range(first, last + 1))]
        if self.ratio == 4:
            chosen = self.chosen[token].cpu()
            entries = chosen[chosen >= 0].tolist()
        else:
            entries = list(range((position + 1) // self.ratio if self.ratio else 0))
        if entries:
            found.append(reference.gather(self.pages, self.table[request], entries))
        return torch.cat(found)


def sink_report(batch: Batch, output: torch.Tensor, sinks: torch.Tensor) -> str:
    """A report of the error of `output` against attention with and without the
    sinks."""
    expected = batch.expected(sinks)
    error = reference.relative(output, expected)
    no_sinks = torch.full_like(sinks, -torch.inf)
    without = reference.relative(output, batch.expected(no_sinks))
    rows = (output.double().cpu() - expected).norm(dim=-1)
    rows /= expected.norm(dim=-1).clamp_min(1e-6)
    token, head = divmod(int(rows.nan_to_num(torch.inf).argmax()), rows.shape[1])
    return (
        f"off by {error:.2%} from attention with sinks, {without:.2%} without;"
        f" most at token {token}, head {head} (sink {sinks[head]:.2f}):"
        f" {rows[token, head]:.1%}"
    )


def zeros_far_out(size: int) -> torch.Tensor:
    """`size` bf16 zeros. On a CPU, only pages that are written take memory."""
    if layout.device() != "cpu":
        return torch.zeros(size, dtype=torch.bfloat16, device=layout.device())
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, 2 * size, flags=flags), dtype=torch.bfloat16)


def far_apart(values: torch.Tensor, stride: int) -> torch.Tensor:
    """`values` with `stride` elements between the entries of its first dimension.

    In front lie 2^31 zeros, so that an offset that wrapped in 32 bits reads wrong
    values and not foreign memory.
    """
    front = 2**31
    buffer = zeros_far_out(front + stride * (len(values) - 1) + values[0].numel())
    strides = (stride, *values.stride()[1:])
    apart = buffer.as_strided(values.shape, strides, front)
    return apart.copy_(values)


@contextmanager
def workspace_far_out(monkeypatch: pytest.MonkeyPatch, size: int) -> Iterator[None]:
    """A workspace of `size` bf16 values that takes memory only where it is written,
    with 2^31 zeros in front as in `far_apart`."""
    front = 2**31
    buffer = zeros_far_out(front + size)[front:].view(torch.uint8)
    manager = layout.module("vllm.v1.worker.workspace").WorkspaceManager

    def lend(self: Any, required: int) -> torch.Tensor:
        assert required <= buffer.numel(), f"{required} B wanted"
        return buffer

    with monkeypatch.context() as patch:
        patch.setattr(manager, "_ensure_workspace_size", lend)
        yield
