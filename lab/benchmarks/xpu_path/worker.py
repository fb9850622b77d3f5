# SPDX-License-Identifier: Apache-2.0
"""A worker that fills pages, times and profiles steps, and checks attention.

Lives inside an installed vLLM, on the GPU.
"""

import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from vllm.forward_context import get_forward_context

from lab.benchmarks.xpu_path import cache_pages, parts
from standins.emulated_xpu.on_cuda.worker import XpuPathOnCudaWorker

ROWS = 16
"""Tokens of a batch whose attention is checked in each layer."""
_replays: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
Event = torch.cuda.Event
"""Kept, because vLLM's XPU runner puts a function in its place."""


class TimedGraph(torch.cuda.CUDAGraph):
    """A graph that times its replays."""

    def replay(self) -> None:
        begin, end = Event(enable_timing=True), Event(enable_timing=True)
        begin.record()
        super().replay()
        end.record()
        _replays.append((begin, end))


class TimedWorker(XpuPathOnCudaWorker):
    """What a case asks for is set by `begin_case`, and read by `end_case`."""

    eager = False
    first_profiled = 2
    """The step that a profile begins with: its kernels are compiled."""

    def init_device(self) -> None:
        torch.xpu.XPUGraph = TimedGraph
        super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        count_experts_on_the_device()
        super().load_model(*args, **kwargs)
        model = self.model_runner.model
        parts.name_parts(model)
        self.errors: dict[str, float] = {}
        self.probes: dict[int, list[Probe]] = {}
        self.checking = False
        for module in model.modules():
            if hasattr(module, "forward_mqa") and hasattr(module, "swa_cache_layer"):
                module.forward_mqa = self._checked(module, module.forward_mqa)

    def begin_case(self, eager: bool, fill: bool, batch: int, tokens: int) -> None:
        """Start a case: in captured graphs, or in eager mode with checks; with pages
        that are filled after the first step, or with prompts that fill them."""
        torch.cuda.synchronize()
        _replays.clear()
        self.eager, self.fill, self.step = eager, fill, 0
        self.filled = (batch, tokens)
        cache_pages.zero_caches(self.model_runner)
        self.starts: list[Any] = []
        self.rows: list[parts.Row] = []
        self.errors = {}
        if manager := getattr(self.model_runner, "cudagraph_manager", None):
            manager._graphs_captured = not eager
        self._profile: Any = None

    def execute_model(self, scheduler_output: Any) -> Any:
        if not hasattr(self, "starts") or not scheduler_output.num_scheduled_tokens:
            return super().execute_model(scheduler_output)
        begins = bool(scheduler_output.scheduled_new_reqs)
        self.checking = self.eager and self.step == (1 if self.fill else 0)
        if self.eager and self.step == self.first_profiled:
            torch.cuda.synchronize()
            self._profile = profile(
                activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]
            )
            self._profile.__enter__()
        start = Event(enable_timing=True)
        start.record()
        self.starts.append(start)
        result = super().execute_model(scheduler_output)
        if self.fill and not self.eager and self.step == 1:
            torch.cuda.synchronize()
            metadata = self.model_runner.execute_model_state.attn_metadata
            for probe in self.probes[self.filled[0]]:
                self._check(probe, metadata)
        if begins and self.fill:
            cache_pages.fill_caches(self.model_runner, *self.filled)
        self.step += 1
        return result

    def end_case(self) -> dict[str, Any]:
        """Milliseconds of replays and between starts, kernels by part, and the largest
        relative error of attention by ratio."""
        end = Event(enable_timing=True)
        end.record()
        torch.cuda.synchronize()
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            with tempfile.TemporaryDirectory() as folder:
                trace = Path(folder) / "trace.json"
                self._profile.export_chrome_trace(str(trace))
                self.rows = parts.rows_of_trace(trace)
            self._profile = None
        starts = [*self.starts, end]
        return {
            "replays": [begin.elapsed_time(end) for begin, end in _replays],
            "steps": [a.elapsed_time(b) for a, b in pairwise(starts)],
            "profiled": max(self.step - self.first_profiled, 0),
            "rows": [vars(row) for row in self.rows],
            "errors": dict(self.errors),
        }

    def _checked(self, layer: Any, forward: Any) -> Any:
        def run(q: Any, kv: Any, positions: Any, output: Any) -> None:
            forward(q, kv, positions, output)
            if torch.cuda.is_current_stream_capturing():
                probe = Probe(layer, q, positions, output).copied()
                self.probes.setdefault(len(q), []).append(probe)
            elif self.checking:
                metadata = get_forward_context().attn_metadata
                self._check(Probe(layer, q, positions, output), metadata)
                if not isinstance(output, torch.Tensor):
                    rows = torch.empty_like(q)
                    forward(q, kv, positions, rows)
                    self._check(Probe(layer, q, positions, rows), metadata)

        return run

    def _check(self, probe: "Probe", metadata: Any) -> None:
        layer = probe.layer
        window = metadata[layer.swa_cache_layer.prefix]
        own = metadata.get(layer.prefix)
        last = len(probe.positions) - 1
        for row in sorted({last * i // (ROWS - 1) for i in range(ROWS)}):
            position = int(probe.positions[row])
            q, chosen = probe.q[row], probe.chosen[row]
            args = (layer, window, own, q, row, position, chosen)
            wanted = cache_pages.expected_core(*args)
            label = f"ratio {layer.compress_ratio}"
            if isinstance(probe.output, torch.Tensor):
                given = probe.output[row, : len(wanted)].double()
            else:
                label += cache_pages.IN_FP8
                wanted = cache_pages.in_fp8(layer, wanted, probe.positions[row])
                given = cache_pages.of_operands(
                    probe.output.data[:, row], probe.output.scale[:, row]
                )
            error = float((given - wanted).norm() / wanted.norm())
            # NaN is not below anything either.
            if not error <= self.errors.get(label, 0.0):
                self.errors[label] = error


def count_experts_on_the_device() -> None:
    """Let the class that stands in for that of old vllm-xpu-kernels make its counts
    where the rows are. It makes them on the default device."""
    from vllm_xpu_kernels.fused_moe_interface import XpuFusedMoe

    apply = XpuFusedMoe.apply

    def on_the_device(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cuda"):
            return apply(*args, **kwargs)

    XpuFusedMoe.apply = on_the_device


class Probe:
    """The inputs and the output of an attention layer. A copy that is captured into a
    graph holds, after each replay, what that replay computed; it costs some
    microseconds."""

    def __init__(self, layer: Any, q: Any, positions: Any, output: Any) -> None:
        self.layer, self.q, self.positions = layer, q, positions
        self.output, self.chosen = output, layer.topk_indices_buffer

    def copied(self) -> "Probe":
        self.chosen = self.chosen[: len(self.q)]
        for name in ("q", "positions", "chosen"):
            setattr(self, name, getattr(self, name).clone())
        if isinstance(self.output, torch.Tensor):
            self.output = self.output.clone()
        else:
            data, scale = self.output.data.clone(), self.output.scale.clone()
            self.output = replace(self.output, data=data, scale=scale)
        return self
