# SPDX-License-Identifier: Apache-2.0
"""The draft model's layer runs on XPU: norms, hyper-connections, attention."""

import pytest
import torch
from helpers import kernel_trace, layer_parts, layout
from helpers import reference_attention as reference
from helpers.decoder_layer import Decoder, Draft

TOLERANCE = 8e-3  # a dozen roundings to bf16 in a row
LAUNCHES = {0: 12, 4: 19, 128: 14}
"""Most Triton launches of a layer by its ratio, as `docs/layers.md` has them."""


def check(draft: Draft, output: torch.Tensor) -> None:
    expected = draft.expected()
    shapes = f"the draft gives {list(output.shape)}, not {list(expected.shape)}"
    assert output.shape == expected.shape, shapes
    error = reference.relative(output, expected)
    assert error < TOLERANCE, f"the draft layer is off by {error:.1%}"


def test_draft_tokens() -> None:
    draft = Draft((131, 5, 1))
    with draft.attention.batch.ready():
        output = draft.run()
    check(draft, output)


def test_it_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Draft((131, 5))
    layer_parts.open_ops(monkeypatch)
    with (
        draft.attention.batch.ready(),
        kernel_trace.no_waiting(monkeypatch),
        kernel_trace.traced(monkeypatch) as trace,
    ):
        output = draft.run()
    print(f"draft layer: {kernel_trace.summary(trace)}")
    check(draft, output)


@pytest.mark.unchanged
@pytest.mark.parametrize("ratio", layout.COMPRESS_RATIOS)
def test_layers_of_the_model_wait_for_nothing(
    ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder(ratio, (601, 131))
    if ratio == 4:
        decoder.attention.take_indexer()
    layer_parts.open_ops(monkeypatch)
    with (
        decoder.attention.batch.ready(),
        kernel_trace.no_waiting(monkeypatch),
        kernel_trace.traced(monkeypatch) as trace,
    ):
        output = decoder.run()
    print(f"ratio {ratio}: {kernel_trace.summary(trace)}")
    assert len(trace.launches) <= LAUNCHES[ratio], f"launches {trace.launches}"
    error = reference.relative(output, decoder.expected())
    assert error < TOLERANCE, f"the layer is off by {error:.1%}"
