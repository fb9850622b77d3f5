# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compare the captured graphs of an XPU with eager execution, once, at start.

A graph that reads memory which has moved, or a number of the host that was true
while it was captured, answers with wrong text and no error. So each captured size
is replayed on requests that the capture did not see, and the same step is run again
in eager mode, padded as the graph is: both then launch the same kernels on the same
shapes, and a graph without a fault gives the same rows and caches. So do graphs of
drafts, after the same step. Serving is as it was.
"""

import os
import time
from operator import attrgetter
from typing import Any

import torch

from vllm.distributed.parallel_state import get_world_group
from vllm.logger import init_logger
from vllm_xpu_dsv4.graph_check_cases import Case, Cases
from vllm_xpu_dsv4.graph_check_drafts import DraftGraphs
from vllm_xpu_dsv4.graph_check_steps import Steps
from vllm_xpu_dsv4.graph_check_twins import drop_graphs, replaced
from vllm_xpu_dsv4.graph_check_writes import first_layer
from vllm_xpu_dsv4.platform import GRAPH_CHECK

logger = init_logger("vllm.plugins.xpu_dsv4")

# The models whose caches a step may write again. A step of a recurrent layer moves its
# state on, so the same step cannot run by a graph and in eager mode.
MODEL_TYPES = ("deepseek_v4", "deepseek_v41")
# How far a row of hidden states may be from its eager twin, relative to the twin's
# norm: a hundredth of what a wrong weight or number changed in any layer. Where an
# eager step is not the same when it runs again, before any replay, NOISE_FACTOR times
# that distance.
BOUND, NOISE_FACTOR, MAX_BOUND = 1e-3, 4.0, 0.5
WANTED = ("fallback", "stop", "off")
"""Values of VLLM_XPU_GRAPH_CHECK: serve without graphs, end the start, do not compare.
The first one is that of a variable which is not set."""
# In the place of a case where none differs.
NO_CASE = 1 << 30


def check_captured_graphs(runner: Any) -> None:
    """Compare each captured size of a model runner with eager execution, if the model
    is of DeepSeek-V4's family.

    If one differs on any rank, all ranks drop their graphs and serve in eager mode,
    or stop if VLLM_XPU_GRAPH_CHECK is "stop".

    Raises:
        ValueError: VLLM_XPU_GRAPH_CHECK is none of its values.
        RuntimeError: a graph differs and VLLM_XPU_GRAPH_CHECK is "stop", or replays
            have written to memory of others, so that eager mode is wrong as well.

    """
    config, wanted = runner.model_config.hf_text_config, _wanted()
    if wanted == "off" or getattr(config, "model_type", None) not in MODEL_TYPES:
        return
    if getattr(runner.vllm_config, "is_mm_encoder_only", False):
        return  # Its runner takes no steps.
    if runner.vllm_config.kv_transfer_config is not None or (
        runner.model_config.runner_type == "pooling"
    ):
        logger.warning(
            "Captured graphs are not compared with eager execution: the check does "
            "not know KV connectors and pooling models."
        )
        return
    start = time.perf_counter()
    difference = first_difference(runner)
    logger.info(
        "Checking the captured graphs took %.1f secs", time.perf_counter() - start
    )
    if difference is None:
        return
    if wanted == "stop":
        raise RuntimeError(
            f"{difference} VLLM_XPU_GRAPH_CHECK=fallback serves without graphs; "
            "--enforce-eager captures none."
        )
    logger.error("%s Serving without graphs.", difference)
    drop_graphs(runner)


def _wanted() -> str:
    """What to do if a graph differs."""
    value = os.environ.get(GRAPH_CHECK, WANTED[0])
    if value not in WANTED:
        raise ValueError(f"{GRAPH_CHECK} is {value!r}. Use one of: {', '.join(WANTED)}")
    return value


@torch.inference_mode()
def first_difference(runner: Any) -> str | None:
    """The first difference in words, or None: the same one on all ranks."""
    drafts = DraftGraphs(runner)
    steps = Steps(runner, drafts)
    metrics = runner.vllm_config.observability_config
    with replaced(metrics, cudagraph_metrics=True):
        try:
            requests, cases = Cases(runner, drafts).build()
            steps.prefill(requests)
            return compare(steps, cases) if cases else None
        finally:
            steps.finish()


def compare(steps: Steps, cases: list[Case]) -> str | None:
    # The largest batch, with tokens that no case has, and with drafts if any has.
    size = attrgetter("drafts", "graph_tokens")
    reference = max(cases, key=size), len(cases)
    untouched = steps.run(*reference, eager=True)
    # No replay has been there, so that no fault of a graph can raise the bound.
    noise = steps.run(*reference, eager=True).error(untouched)
    bound = min(max(BOUND, NOISE_FACTOR * noise), MAX_BOUND)
    errors: list[float] = []
    layers: list[str | None] = []
    missed: list[str] = []
    for seed, case in enumerate(cases):
        replayed = steps.run(case, seed)
        eager = steps.run(case, seed, eager=True)
        stat, used = replayed.stat, (str(case.mode), case.graph_tokens)
        if stat and (stat.runtime_mode, stat.num_padded_tokens) != used:
            missed.append(str(case))
        errors.append(replayed.error(eager))
        layers.append(first_layer(replayed.digests, eager.digests))
    again = steps.run(*reference, eager=True)
    damage = again.error(untouched)
    batches = len(cases) - len(missed)
    missed += steps.drafts.missed()
    if missed:
        logger.warning("No batch came to the %s: not checked", ", ".join(missed))
    wrong = [
        i
        for i, (error, layer) in enumerate(zip(errors, layers))
        # Rows that differ by rounding come with other bytes in the caches.
        if not error <= bound or (error == 0 and layer is not None)
    ]
    first = first_of_all_ranks(wrong[0] if wrong else NO_CASE)
    damaged = not first_of_all_ranks(int(damage <= bound))
    if first != NO_CASE:
        # A pipeline stage without drafts has fewer cases.
        here = min(first, len(cases) - 1)
        name = cases[here] if here == first else "graph of another stage's drafts"
        subject = f"The {name} differs from eager execution"
        error, layer = errors[here], layers[here]
    elif damaged:
        subject = f"Eager mode for the {reference[0]} is another one after replays"
        error = damage
        layer = first_layer(again.digests, untouched.digests)
    else:
        logger.info(
            "%d batches are the same by captured graphs and in eager mode: rows "
            "differ by up to %.2g, an eager step run again by %.2g (bound %.2g); the "
            "caches of %d batches are the same to the byte. Drafts of %d batches are "
            "among them",
            *(batches, max(errors), noise, bound),
            *(layers.count(None), sum(case.drafts for case in cases)),
        )
        return None
    difference = (
        f"{subject}: on this rank a row is off by {error:.2g} of its norm (bound "
        f"{bound:.2g}); the caches differ first {layer or 'nowhere'}."
    )
    if damaged:
        raise RuntimeError(
            f"{difference} Replays have written to memory of others: after them an "
            "eager step is another one than before. Start with --enforce-eager, "
            "which captures no graphs."
        )
    return difference


def first_of_all_ranks(index: int) -> int:
    first = torch.tensor(index)
    torch.distributed.all_reduce(
        first, torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group
    )
    return int(first)
