# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compare the captured graphs of an XPU with eager execution, once, at start.

A graph that reads memory which has moved, or a number of the host that was true
while it was captured, answers with wrong text and no error. So each captured size
is replayed on requests that the capture did not see, and the same step is run again
in eager mode, padded as the graph is: both then launch the same kernels on the same
shapes, and a graph without a fault gives the same rows. Serving is as it was.
"""

import time
from operator import attrgetter
from typing import Any

import torch

import vllm.envs as envs
from vllm.distributed.parallel_state import get_world_group
from vllm.logger import init_logger
from vllm.v1.worker.xpu_graph_check_cases import Case, Cases
from vllm.v1.worker.xpu_graph_check_steps import Steps
from vllm.v1.worker.xpu_graph_check_twins import drop_graphs, replaced

logger = init_logger(__name__)

# The models whose caches a step may write again. A step of a recurrent layer moves its
# state on, so the same step cannot run by a graph and in eager mode.
MODEL_TYPES = ("deepseek_v4", "deepseek_v41")
# How far a row of hidden states may be from its eager twin, relative to the twin's
# norm: a hundredth of what a wrong weight or number changed in any layer. Where an
# eager step is not the same when it runs again, before any replay, NOISE_FACTOR times
# that distance.
BOUND, NOISE_FACTOR, MAX_BOUND = 1e-3, 4.0, 0.5


def check_captured_graphs(runner: Any) -> None:
    """Compare each captured size of a model runner with eager execution, if the model
    is of DeepSeek-V4's family.

    If one differs on any rank, all ranks drop their graphs and serve in eager mode,
    or stop if VLLM_XPU_GRAPH_CHECK is "stop".

    Raises:
        RuntimeError: a graph differs and VLLM_XPU_GRAPH_CHECK is "stop".

    """
    config = runner.model_config.hf_text_config
    if envs.VLLM_XPU_GRAPH_CHECK == "off" or (
        getattr(config, "model_type", None) not in MODEL_TYPES
    ):
        return
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
    if envs.VLLM_XPU_GRAPH_CHECK == "stop":
        raise RuntimeError(
            f"{difference} VLLM_XPU_GRAPH_CHECK=fallback serves without graphs; "
            "--enforce-eager captures none."
        )
    logger.error("%s Serving without graphs.", difference)
    drop_graphs(runner)


@torch.inference_mode()
def first_difference(runner: Any) -> str | None:
    """The first difference in words, or None: the same one on all ranks."""
    steps = Steps(runner)
    metrics = runner.vllm_config.observability_config
    with replaced(metrics, cudagraph_metrics=True):
        try:
            requests, cases = Cases(runner).build()
            steps.prefill(requests)
            return compare(steps, cases) if cases else None
        finally:
            steps.finish()


def compare(steps: Steps, cases: list[Case]) -> str | None:
    # The largest batch, with tokens that no case has.
    reference = max(cases, key=attrgetter("graph_tokens")), len(cases)
    untouched = steps.run(*reference, eager=True)
    # No replay has been there, so that no fault of a graph can raise the bound.
    noise = steps.run(*reference, eager=True).error(untouched)
    bound = min(max(BOUND, NOISE_FACTOR * noise), MAX_BOUND)
    errors: list[float] = []
    missed: list[str] = []
    for seed, case in enumerate(cases):
        replayed = steps.run(case, seed)
        eager = steps.run(case, seed, eager=True)
        stat, used = replayed.stat, (str(case.mode), case.graph_tokens)
        if stat and (stat.runtime_mode, stat.num_padded_tokens) != used:
            missed.append(str(case))
        errors.append(replayed.error(eager))
    if missed:
        logger.warning("No batch came to the %s: not checked", ", ".join(missed))
    wrong = [i for i, error in enumerate(errors) if not error <= bound]
    first = first_of_all_ranks(wrong[0] if wrong else len(cases))
    if first < len(cases):
        return (
            f"The {cases[first]} differs from eager execution: on this rank a row is "
            f"off by {errors[first]:.2g} of its norm (bound {bound:.2g})."
        )
    logger.info(
        "%d batches are the same by captured graphs and in eager mode: rows differ by "
        "up to %.2g, an eager step run again by %.2g (bound %.2g)",
        *(len(cases) - len(missed), max(errors), noise, bound),
    )
    return None


def first_of_all_ranks(index: int) -> int:
    first = torch.tensor(index)
    torch.distributed.all_reduce(
        first, torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group
    )
    return int(first)
