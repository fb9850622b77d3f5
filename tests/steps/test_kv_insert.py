# SPDX-License-Identifier: Apache-2.0
"""One launch norms and rotates the query and stores the rotated key to its page: an op
of the pinned kernels where they have it, or a Triton kernel."""

from types import SimpleNamespace

import pytest
import torch
from helpers import (
    attention_batch,
    kernel_trace,
    layer_parts,
    layout,
    model_configs,
    model_layers,
    pin_ops,
)
from helpers import reference_attention as reference

TOLERANCE = 4e-3
BLOCKS = 3
OP = "deepseek_qnorm_rope_kv_insert"
BY_OP = pin_ops.has(OP)


class Insert:
    """A window-only layer with an empty cache, and random tokens for given slots."""

    def __init__(self, slots: list[int], heads: int = layout.HEADS) -> None:
        config = model_configs.vllm_config()
        self.layer = layer_parts.projecting(model_layers.attention_layer(config, 0))
        spec = self.layer.swa_cache_layer.get_kv_cache_spec(config)
        pages = torch.zeros(BLOCKS, spec.page_size_bytes, dtype=torch.uint8)
        self.block_size = spec.block_size
        self.cache = reference.as_cache(pages.to(layout.device()), spec.block_size)
        self.layer.swa_cache_layer.kv_cache = self.cache
        generator = torch.Generator().manual_seed(3)
        tokens, dim = len(slots), reference.HEAD_DIM
        kv = torch.randn(tokens, dim, generator=generator).to(torch.bfloat16)
        q = torch.randn(tokens, heads, dim, generator=generator).to(torch.bfloat16)
        self.kv, self.q = kv.to(layout.device()), q.to(layout.device())
        self.positions = torch.arange(100, 100 + tokens).to(layout.device())
        self.slots = torch.tensor(slots).to(layout.device())
        table = self.layer.rotary_emb.cos_sin_cache[100 : 100 + tokens].cpu()
        normal = reference.normalize(q, self.layer.eps)
        self.expected_q = reference.rotate(normal, table[:, None])
        self.expected_kv = reference.quantize(reference.rotate(kv, table))

    def run(self) -> torch.Tensor:
        """The queries after the insert: what it returns, or those it was given."""
        metadata = SimpleNamespace(slot_mapping=self.slots, block_size=self.block_size)
        metadata_by_layer = {self.layer.swa_cache_layer.prefix: metadata}
        return layer_parts.insert_keys(
            self.layer, self.q, self.kv, self.positions, metadata_by_layer
        )

    def stored(self, slot: int) -> torch.Tensor:
        block, position = divmod(slot, self.block_size)
        return reference.read(self.cache.cpu(), block, position)


def test_one_launch_stores_each_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    insert = Insert([5, 64, 190])
    with (
        kernel_trace.traced(monkeypatch) as trace,
        kernel_trace.stores(monkeypatch) as again,
        pin_ops.recorded(monkeypatch, OP) as calls,
    ):
        insert.run()
    print(f"figure: bytes stored again by each launch: {again}")
    assert not any(again), f"bytes stored again by each launch: {again}"
    launches = [*calls, *trace.launches]
    assert len(launches) == 1, f"launches {launches}"
    assert calls == ([OP] if BY_OP else [])


def test_it_makes_no_copy_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    insert = Insert([5, 64])
    with kernel_trace.traced(monkeypatch) as trace:
        insert.run()
    assert not trace.made, f"allocates: {sorted(set(trace.made))}"


if not BY_OP:  # a stand-in has no offsets

    def test_tokens_reach_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
        insert = Insert([70], heads=64)
        tokens = 2**31 // insert.q.numel() + 1
        shape = (tokens, *insert.q.shape[1:])
        front = attention_batch.zeros_far_out(2**31 + tokens * insert.q.numel())
        q = front[2**31 :].view(shape)
        q[-1] = insert.q[0]
        kv = attention_batch.zeros_far_out(tokens * reference.HEAD_DIM)
        kv = kv.view(tokens, reference.HEAD_DIM)
        kv[-1] = insert.kv[0]
        positions = insert.positions.new_zeros(tokens)
        positions[-1] = insert.positions[0]
        slots = insert.slots.new_full((tokens,), -1)
        slots[-1] = insert.slots[0]
        insert.q, insert.kv, insert.positions, insert.slots = q, kv, positions, slots
        with kernel_trace.last_row_of_programs(monkeypatch):
            output = insert.run()
        error = reference.relative(output[-1:], insert.expected_q)
        assert error < TOLERANCE, f"the last of {tokens} queries is off by {error:.0%}"
        assert reference.relative(insert.stored(70), insert.expected_kv[0]) < TOLERANCE


@layout.unchanged_with_xpu_folder
def test_values_and_page() -> None:
    slots = [5, -1, 64, 190]
    insert = Insert(slots)
    output = insert.run()
    assert reference.relative(output, insert.expected_q) < TOLERANCE
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected = insert.expected_kv[row]
            assert reference.relative(insert.stored(slot), expected) < TOLERANCE
    written = [slot for slot in range(192) if insert.stored(slot).any()]
    assert written == sorted(slot for slot in slots if slot >= 0)


@layout.unchanged_with_xpu_folder
def test_rows_that_pad_a_batch_have_no_slot() -> None:
    insert = Insert([5, 64, 190, 7])
    insert.slots = insert.slots[:2]
    output = insert.run()
    assert reference.relative(output[:2], insert.expected_q[:2]) < TOLERANCE
    assert [slot for slot in range(192) if insert.stored(slot).any()] == [5, 64]


if not layout.WITH_XPU_FOLDER:  # one class serves CUDA and XPU

    @pytest.mark.unchanged
    @pytest.mark.any_platform
    def test_cuda_keeps_its_op(monkeypatch: pytest.MonkeyPatch) -> None:
        layout.pretend_cuda(monkeypatch)
        insert = Insert([5, 64])
        calls = []
        name = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
        monkeypatch.setattr(
            torch.ops._C, name, lambda *args: calls.append(args), raising=False
        )
        insert.run()
        assert [args[:2] for args in calls] == [(insert.q, insert.kv)]
        assert calls[0][2].dim() == 2
