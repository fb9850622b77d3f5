# SPDX-License-Identifier: Apache-2.0
"""The compressor of the main cache is an op of vllm-xpu-kernels, unless the user
chooses the Triton kernel."""

import pytest
import torch
from helpers import compressor_run, kernel_trace, layout, model_configs, model_layers
from helpers.compressor_run import Written
from helpers.indexer_batch import quarter_turns

SWITCH = "VLLM_XPU_DSV4_TRITON_OPS"
HEAD, NOPE = 512, 448
LENGTHS = {4: (9, 3, 18), 128: (130, 257)}


class Batch:
    """Requests from their first token on, through the compressor of one ratio."""

    def __init__(self, ratio: int, *, indexer: bool = False) -> None:
        torch.manual_seed(ratio)
        self.lengths = LENGTHS[ratio]
        self.config = model_configs.vllm_config()
        self.compressor = model_layers.compressor(
            self.config, indexer=indexer, ratio=ratio
        )
        head = self.compressor.head_dim
        self.weight = torch.rand(head).bfloat16().float() + 0.5
        self.ape = torch.zeros_like(self.compressor.ape, device="cpu")
        width = self.ape.shape[1]
        self.rows = torch.randn(sum(self.lengths), 2 * width)
        self.turns = quarter_turns(max(self.lengths))

    def make_exact(self) -> None:
        """Let no sum depend on its order: equal scores and small whole numbers."""
        width = self.ape.shape[1]
        self.rows[:, :width] = torch.randint(-1, 2, self.rows[:, :width].shape)
        self.rows[:, width:] = 0

    def run(
        self, monkeypatch: pytest.MonkeyPatch, *, triton: bool, padding: int = 0
    ) -> tuple[Written, list[str]]:
        """What the batch writes, and the kernels that compressed it."""
        monkeypatch.setenv(SWITCH, str(int(triton)))
        self.compressor.norm.weight.data = self.weight.to(layout.device())
        self.compressor.ape.data = self.ape.to(layout.device())
        with kernel_trace.traced(monkeypatch) as trace:
            written = compressor_run.run(
                self.config,
                self.compressor,
                self.rows,
                self.turns,
                self.lengths,
                padding=padding,
            )
        return written, [name for name in trace.launches if "compress" in name]


def both(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> tuple[Written, Written, list[str]]:
    """What the op writes, what the Triton kernel writes, and what the op launched."""
    op, launched = batch.run(monkeypatch, triton=False)
    kernel, kernels = batch.run(monkeypatch, triton=True)
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
    whole, _ = batch.run(monkeypatch, triton=False)
    padded, launched = batch.run(monkeypatch, triton=False, padding=5)
    assert torch.equal(padded.data, whole.data)
    assert torch.equal(padded.scales, whole.scales)
    assert not launched, f"launched {launched}"


@pytest.mark.unchanged
def test_the_indexer_s_keys_come_from_the_triton_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Batch(4, indexer=True).run(monkeypatch, triton=False)[1]


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_rocm_launches_the_triton_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(4)
    module = layout.module(layout.COMPRESSOR)
    rocm = layout.another_platform(module.current_platform, rocm=True)
    monkeypatch.setattr(module, "current_platform", rocm)
    assert batch.run(monkeypatch, triton=False)[1]
