# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Eager twins of captured steps: the code that a graph captured, on the shapes and with
the metadata that it was captured with, and no graph."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager


def without_graphs(runner: Any) -> AbstractContextManager[None]:
    """Steps of the model, not of drafts, without graphs."""
    if (manager := getattr(runner, "cudagraph_manager", None)) is not None:
        return replaced(manager, _graphs_captured=False)
    return replaced(runner.cudagraph_dispatcher, cudagraph_mode=CUDAGraphMode.NONE)


@contextmanager
def eager_twin(runner: Any, mode: CUDAGraphMode) -> Iterator[None]:
    """Eager steps of the model with the padding and the metadata of a captured one."""
    if mode != CUDAGraphMode.FULL:
        with without_graphs(runner):  # Its prompts fill the graph.
            yield
    elif (manager := getattr(runner, "cudagraph_manager", None)) is not None:
        dispatch, prepare = manager.dispatch, runner.model_state.prepare_attn

        def eager(*args: Any, **kwargs: Any) -> Any:
            return replace(dispatch(*args, **kwargs), cg_mode=CUDAGraphMode.NONE)

        def captured(batch: Any, mode: Any, *args: Any, **given: Any) -> Any:
            given["for_capture"] = True  # Tables of the longest context.
            return prepare(batch, CUDAGraphMode.FULL, *args, **given)

        with (
            replaced(manager, dispatch=eager),
            replaced(runner.model_state, prepare_attn=captured),
        ):
            yield
    else:
        build = partial(runner._build_attention_metadata, for_cudagraph_capture=True)
        model = runner.model.runnable
        with replaced(runner, model=model, _build_attention_metadata=build):
            yield


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give an object other attributes for a while."""
    attributes = vars(owner)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            del attributes[name]
        attributes.update(before)


def drop_graphs(runner: Any) -> None:
    """Free the captured graphs, those of drafts as well, and dispatch to none."""
    if (manager := getattr(runner, "cudagraph_manager", None)) is not None:
        drafts = vars(runner.speculator).values() if runner.speculator else ()
        for owner in (manager, *drafts):
            if isinstance(owner, CudaGraphManager):
                owner.graphs.clear()
                owner._graphs_captured = False
    else:
        runner.cudagraph_dispatcher.cudagraph_mode = CUDAGraphMode.NONE
        CUDAGraphWrapper.clear_all_graphs()
    BreakableCUDAGraphWrapper.clear_all_graphs()
    torch.accelerator.empty_cache()
