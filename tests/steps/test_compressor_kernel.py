# SPDX-License-Identifier: Apache-2.0
"""Where no op of vllm-xpu-kernels compresses keys of the main cache, our Triton kernel
does, not the one that holds a whole block of tokens."""

import pytest
import torch
from helpers.compressor_batch import Batch
from helpers.compressor_run import Written

NOPE = 448
OURS = "_compress_insert_kernel"


def both(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> tuple[Written, Written]:
    """What XPU writes, and what another platform does."""
    written, launched = batch.run(monkeypatch)
    other, kernels = batch.run_on_rocm(monkeypatch)
    assert OURS not in kernels and kernels, f"launched {kernels} to compare with"
    assert launched == [OURS], f"launched {launched}"
    return written, other


@pytest.mark.parametrize("ratio", [4, 128])
def test_the_bytes_are_those_of_the_other_kernel(
    ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(ratio)
    batch.make_exact()
    ours, other = both(batch, monkeypatch)
    entries = int(other.scales.any(-1).sum())
    assert entries == sum(length // ratio for length in batch.lengths)
    assert torch.equal(ours.scales, other.scales)
    assert torch.equal(ours.data, other.data)


@pytest.mark.parametrize("ratio", [4, 128])
def test_the_order_of_the_sums_is_all_that_differs(
    ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = both(Batch(ratio), monkeypatch)
    assert torch.equal(ours.scales, other.scales)
    codes = (ours.data[:, :NOPE].int() - other.data[:, :NOPE].int()).abs()
    assert int(codes.max()) <= 1 and (codes > 0).float().mean() < 2e-3
    ropes = [x.data[:, NOPE:].clone().view(torch.bfloat16) for x in (ours, other)]
    torch.testing.assert_close(*ropes, atol=1e-5, rtol=2**-7)


def test_rows_that_pad_a_batch_have_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(4)
    whole, _ = batch.run(monkeypatch)
    padded, launched = batch.run(monkeypatch, padding=5)
    assert torch.equal(padded.data, whole.data)
    assert torch.equal(padded.scales, whole.scales)
    assert launched == [OURS], f"launched {launched}"


@pytest.mark.unchanged
def test_the_indexer_s_keys_come_from_their_own_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = Batch(4, indexer=True).run(monkeypatch)[1]
    assert launched and OURS not in launched


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_rocm_launches_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(4)
    launched = batch.run_on_rocm(monkeypatch)[1]
    assert launched and OURS not in launched
