# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.xpu_path.host_layer ORDER RESULT.json`: what an eager
decode layer costs the host, on the GPU's machine.

Decode steps of the tiny checkpoint, whose kernels end before the host has the next
ones. Stand-ins of vllm-xpu-kernels are timed apart: what they launch is not what the
ops do. Calling them is part of the layer.
"""

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

HOME = "standins.emulated_xpu.on_cuda.environment"
importlib.import_module(HOME)

from lab.benchmarks.xpu_path.graph_check import ENGINE  # noqa: E402
from lab.benchmarks.xpu_path.host_spans import STAND_IN, Spans  # noqa: E402
from lab.benchmarks.xpu_path.jobs import tokens  # noqa: E402
from standins.emulated_xpu.on_cuda.forms.table import FORMS  # noqa: E402
from standins.emulated_xpu.wheel.implementations import IMPLEMENTATIONS  # noqa: E402

COPIES = 2000


def time_stand_ins(spans: Spans) -> None:
    """Time what computes the ops, before they are defined."""
    for name, function in {**IMPLEMENTATIONS, **FORMS}.items():
        FORMS[name] = spans.part(STAND_IN, function)


def time_layers(spans: Spans, model: Any) -> None:
    """Time the layers of a model and their parts."""
    from lab.benchmarks.xpu_path.parts import name_parts

    name_parts(model, spans.part)
    for layer in model.model.layers:
        ratio = layer.attn.compress_ratio
        spans.layer(f"ratio {ratio}" if ratio > 1 else "window", layer)


def copy_of_a_sum(rows: int, width: int) -> list[float]:
    """Microseconds of the host for a copy of what ranks would sum, each of some."""
    import torch

    given = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    taken = []
    for _ in range(COPIES):
        began = time.perf_counter_ns()
        given.clone()
        taken.append((time.perf_counter_ns() - began) / 1e3)
    return taken[COPIES // 2 :]


def main() -> None:
    """Serve one order."""
    order = json.loads(Path(sys.argv[1]).read_text())
    spans = Spans()
    time_stand_ins(spans)
    import torch
    import triton
    from vllm import LLM, SamplingParams

    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()
    llm = LLM(model=order["model"], **ENGINE | order["engine"])
    llm.apply_model(lambda model: time_layers(spans, model))
    prompts = [
        {"prompt_token_ids": tokens(order["length"], seed)}
        for seed in range(order["batch"])
    ]
    asked = SamplingParams(
        temperature=0.0, max_tokens=order["new"], ignore_eos=True, detokenize=False
    )
    for wave in range(order["waves_of_tokens"]):
        if wave == 1:
            # The first one compiles.
            spans.layers.clear()
        llm.generate(prompts, asked, use_tqdm=False)
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "layers": [list(layer) for layer in spans.layers if layer[1] == order["batch"]],
        "copy": copy_of_a_sum(order["batch"], 4096),
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
