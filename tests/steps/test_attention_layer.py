# SPDX-License-Identifier: Apache-2.0
"""The model's own layer attends on XPU: decode, prefill and both, of every kind."""

from typing import Any

import pytest
import torch
from helpers import kernel_trace, layer_parts, layout, model_configs, model_layers
from helpers import reference_attention as reference
from helpers.attention_batch import Batch, random_sinks, sink_report
from helpers.decode_layer import DecodeLayer

TOLERANCE = 4e-3


def check(
    ratio: int, heads: int, seq_lens: tuple[int, ...], new: tuple[int, ...], **kind: Any
) -> None:
    sinks = random_sinks(heads)
    batch = Batch(ratio, seq_lens, new, sinks=sinks, attend=layer_parts.attend, **kind)
    output = batch.forward()
    report = sink_report(batch, output, sinks)
    print(f"ratio {ratio}, {heads} heads, {new} of {seq_lens}: {report}")
    assert output.isfinite().all(), f"{int(output.isnan().sum())} values are NaN"
    assert reference.relative(output, batch.expected(sinks)) < TOLERANCE, report


@pytest.mark.parametrize(("ratio", "heads"), [(0, 64), (4, 32), (4, 8), (128, 16)])
def test_decode(ratio: int, heads: int) -> None:
    check(ratio, heads, (600, 131), (1, 1))


@pytest.mark.parametrize(("ratio", "heads"), [(0, 32), (4, 16), (128, 64)])
def test_prompt_and_chunk_of_a_prompt(ratio: int, heads: int) -> None:
    check(ratio, heads, (3, 260), (3, 2))


@pytest.mark.parametrize(("ratio", "heads"), [(0, 16), (4, 64), (128, 8)])
def test_mixed_batch_with_an_empty_request(ratio: int, heads: int) -> None:
    check(ratio, heads, (131, 5, 259, 9), (1, 0, 2, 0))


def test_prefill_beside_an_empty_request_alone() -> None:
    check(128, 8, (5, 259), (0, 2))


@pytest.mark.parametrize("ratio", layout.COMPRESS_RATIOS)
def test_draft_tokens_and_padding(ratio: int) -> None:
    check(ratio, 8, (266, 9, 130), (2, 1, 2), speculative_tokens=1, padded=2)


def test_small_pages() -> None:
    check(4, 8, (131, 262), (1, 2), block_size=64)


@pytest.mark.unchanged
def test_small_pages_hold_no_entry_of_128_tokens() -> None:
    config = model_configs.vllm_config(block_size=64)
    layer = layer_parts.attending(model_layers.attention_layer(config, 128))
    assert layer.swa_cache_layer.get_kv_cache_spec(config).block_size == 64
    spec = layer.get_kv_cache_spec(config)
    assert (spec.block_size, spec.storage_block_size) == (64, 0)
    assert spec.page_size_bytes == 0
    common = layout.module("vllm.v1.worker.utils").select_common_block_size
    with pytest.raises(ValueError, match="No common block size"):
        common(spec.block_size, [layer.get_attn_backend()])


@pytest.mark.parametrize("ratio", layout.COMPRESS_RATIOS)
def test_decode_asks_for_no_memory(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(
        ratio, (131, 5), (1, 1), sinks=random_sinks(), attend=layer_parts.attend
    )
    with batch.ready() as run, kernel_trace.traced(monkeypatch) as trace:
        run()
    assert not trace.made, f"allocates: {sorted(set(trace.made))}"
    assert len(trace.launches) <= 2 + (ratio == 4), f"launches {trace.launches}"


@pytest.mark.parametrize("ratio", layout.COMPRESS_RATIOS)
def test_whole_layer_decodes_without_waiting(
    ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = DecodeLayer(ratio, (601, 131))
    layer.leave_out_indexer()
    with (
        layer.batch.ready(),
        kernel_trace.no_waiting(monkeypatch),
        kernel_trace.traced(monkeypatch) as trace,
    ):
        output = layer.run()
    print(f"ratio {ratio}: {kernel_trace.summary(trace)}")
    expected = layer.expected()
    wrong_keys = reference.relative(layer.inserted(), layer.keys)
    assert wrong_keys < TOLERANCE, f"inserted keys are off by {wrong_keys:.2%}"
    error = reference.relative(output, expected)
    assert error < TOLERANCE, f"the layer is off by {error:.2%}"
    assert len(trace.launches) <= {0: 4, 4: 7, 128: 6}[ratio], trace.launches


@pytest.mark.parametrize("heads", [8, 64])
def test_heads_are_not_padded(heads: int) -> None:
    layer = model_layers.attention_layer(model_configs.vllm_config(heads=heads), 0)
    padded = layer_parts.projecting(layer).padded_heads
    assert padded == heads, f"{heads} heads become {padded}"
    backend = layer_parts.attending(layer).get_attn_backend()
    assert "XPU" in backend.get_name(), f"the backend is {backend.get_name()}"


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_a_wait_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.ones(2)
    for wait in (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.any):
        with (
            pytest.raises(AssertionError, match="waits for the device"),
            kernel_trace.no_waiting(monkeypatch),
        ):
            bool(getattr(values, wait.__name__)())


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_cuda_keeps_its_backend_and_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    layout.pretend_cuda(monkeypatch)
    layer = model_layers.attention_layer(model_configs.vllm_config(), 0)
    assert layer_parts.projecting(layer).padded_heads == 64
    backend = layer_parts.attending(layer).get_attn_backend()
    assert backend.get_name() == "V4_FLASHMLA_SPARSE"


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_rocm_keeps_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    layout.pretend_cuda(monkeypatch, rocm=True)
    layer = model_layers.attention_layer(model_configs.vllm_config(), 0)
    part = layer_parts.attending(layer)
    kinds = type(part), part.get_attn_backend(), getattr(part, "impl_cls", type(part))
    names = [kind.__name__ for kind in kinds]
    print(names)
    assert not any("XPU" in name for name in names), names
