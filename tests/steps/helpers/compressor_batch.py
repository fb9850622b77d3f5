# SPDX-License-Identifier: Apache-2.0
"""One batch through the compressor of the main cache or of the indexer."""

import pytest
import torch

from . import compressor_run, kernel_trace, layout, model_configs, model_layers
from .compressor_run import Written
from .indexer_batch import quarter_turns

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
        self, monkeypatch: pytest.MonkeyPatch, *, padding: int = 0
    ) -> tuple[Written, list[str]]:
        """What the batch writes, and the Triton kernels that compressed it."""
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

    def run_on_rocm(self, monkeypatch: pytest.MonkeyPatch) -> tuple[Written, list[str]]:
        """As `run`, by the Triton kernel of other platforms."""
        module = layout.module(layout.COMPRESSOR)
        rocm = layout.another_platform(module.current_platform, rocm=True)
        with monkeypatch.context() as patch:
            patch.setattr(module, "current_platform", rocm)
            return self.run(patch)
