# SPDX-License-Identifier: Apache-2.0
"""The compressor of the main cache is an op of vllm-xpu-kernels."""

import pytest
import torch
from helpers.compressor_batch import Batch
from helpers.compressor_run import Written

NOPE = 448


def both(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> tuple[Written, Written, list[str]]:
    """What the op writes, what the Triton kernel writes, and what the op launched."""
    op, launched = batch.run(monkeypatch)
    kernel, kernels = batch.run_on_rocm(monkeypatch)
    assert kernels, "the Triton kernel is not there to compare with"
    return op, kernel, launched


@pytest.mark.parametrize("ratio", [4, 128])
def test_the_op_writes_the_bytes_of_the_kernel(
    ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(ratio)
    batch.make_exact()
    op, kernel, launched = both(batch, monkeypatch)
    entries = int(kernel.scales.any(-1).sum())
    assert entries == sum(length // ratio for length in batch.lengths)
    assert torch.equal(op.scales, kernel.scales)
    assert torch.equal(op.data, kernel.data)
    assert not launched, f"launched {launched}"


@pytest.mark.parametrize("ratio", [4, 128])
def test_the_order_of_the_sums_is_all_that_differs(
    ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, kernel, launched = both(Batch(ratio), monkeypatch)
    assert torch.equal(op.scales, kernel.scales)
    codes = (op.data[:, :NOPE].int() - kernel.data[:, :NOPE].int()).abs()
    assert int(codes.max()) <= 1 and (codes > 0).float().mean() < 2e-3
    ropes = [x.data[:, NOPE:].clone().view(torch.bfloat16) for x in (op, kernel)]
    torch.testing.assert_close(*ropes, atol=1e-5, rtol=2**-7)
    assert not launched, f"launched {launched}"


def test_rows_that_pad_a_batch_have_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op reads a slot for each position that it is given."""
    batch = Batch(4)
    whole, _ = batch.run(monkeypatch)
    padded, launched = batch.run(monkeypatch, padding=5)
    assert torch.equal(padded.data, whole.data)
    assert torch.equal(padded.scales, whole.scales)
    assert not launched, f"launched {launched}"


@pytest.mark.unchanged
def test_the_indexer_s_keys_come_from_the_triton_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Batch(4, indexer=True).run(monkeypatch)[1]


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_rocm_launches_the_triton_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(4)
    assert batch.run_on_rocm(monkeypatch)[1]
