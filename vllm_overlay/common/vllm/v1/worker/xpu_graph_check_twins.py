# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Eager twins of captured steps: the code that a graph captured, on the shapes and with
the metadata that it was captured with, and no graph."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

# The function that each manager of a speculator captures.
CAPTURED_BY = {
    "prefill_cudagraph_manager": "_prefill",
    "decode_cudagraph_manager": "_generate_draft",
    "query_cudagraph_manager": "_generate_draft",
}


class Wrapper:
    """An object with some methods of its own in front of another's."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class EagerManager(Wrapper):
    """A manager that gives a step the padding of its graph, and no graph."""

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        self.desc = self._wrapped.dispatch(*args, **kwargs)
        return replace(self.desc, cg_mode=CUDAGraphMode.NONE)


class CapturedState(Wrapper):
    """A model's state whose attention metadata are those of a captured step: padded,
    with the tables of the longest context."""

    def prepare_attn(self, batch: Any, mode: Any, *args: Any, **given: Any) -> Any:
        given["for_capture"] = True
        return self._wrapped.prepare_attn(batch, CUDAGraphMode.FULL, *args, **given)


class EagerDrafts:
    """Eager twins of the graphs of a speculator."""

    def __init__(self, runner: Any) -> None:
        self.speculator: Any = getattr(runner, "speculator", None)
        # The sizes of full graphs that twins stood for, by the manager's name.
        self.sizes: set[tuple[str, int]] = set()

    @property
    def managers(self) -> dict[str, Any]:
        """The managers that have graphs, by name."""
        return {
            name: manager
            for name, manager in draft_managers(self.speculator).items()
            if manager._graphs_captured and name in CAPTURED_BY
        }

    def descs(self, mode: CUDAGraphMode) -> list[tuple[str, Any]]:
        """The captured graphs of a mode, each with its manager's name."""
        return [
            (name, desc)
            for name, manager in self.managers.items()
            for desc in manager._capture_descs.get(mode, ())
            if desc.num_active_loras == 0
        ]

    def missed(self) -> list[str]:
        """The full graphs that no twin stood for, in words."""
        return [
            f"graph of {name} of {desc.num_tokens} tokens"
            for name, desc in self.descs(CUDAGraphMode.FULL)
            if (name, desc.num_tokens) not in self.sizes
        ]

    @contextmanager
    def replacing_graphs(self) -> Iterator[None]:
        """Run what graphs captured: as many requests as theirs, the longest tables."""
        values: dict[str, Any] = {}
        twins = {name: EagerManager(m) for name, m in self.managers.items()}
        for name, twin in twins.items():
            function = CAPTURED_BY[name]
            captured = getattr(self.speculator, function)
            values |= {name: twin, function: partial(self._padded, captured, twin)}
            if function == "_generate_draft":
                build = self.speculator._build_attn_metadata
                values["_build_attn_metadata"] = partial(self._captured, build, twin)
        with replaced(self.speculator, **values):
            yield
        self.sizes |= {
            (name, twin.desc.num_tokens)
            for name, twin in twins.items()
            if "desc" in vars(twin) and twin.desc.cg_mode == CUDAGraphMode.FULL
        }

    def _padded(
        self,
        function: Callable[..., None],
        twin: EagerManager,
        num_reqs: int,
        *args: Any,
        **given: Any,
    ) -> None:
        function(twin.desc.num_reqs or num_reqs, *args, **given)

    def _captured(
        self,
        build: Callable[..., Any],
        twin: EagerManager,
        *,
        batch_desc: Any,
        **given: Any,
    ) -> Any:
        if twin.desc.cg_mode == CUDAGraphMode.FULL:
            batch_desc = twin.desc
            self.speculator.draft_max_seq_len = self.speculator.max_model_len
        return build(batch_desc=batch_desc, **given)


def draft_managers(speculator: Any) -> dict[str, CudaGraphManager]:
    """The managers of a speculator's graphs, by name."""
    if speculator is None:
        return {}
    values = vars(speculator).items()
    return {name: v for name, v in values if isinstance(v, CudaGraphManager)}


def without_graphs(runner: Any) -> AbstractContextManager[None]:
    """Steps of the model, not of drafts, without graphs."""
    if (manager := getattr(runner, "cudagraph_manager", None)) is not None:
        return replaced(manager, _graphs_captured=False)
    return replaced(runner.cudagraph_dispatcher, cudagraph_mode=CUDAGraphMode.NONE)


def eager_twin(runner: Any, mode: CUDAGraphMode) -> AbstractContextManager[None]:
    """Eager steps of the model with the padding and the metadata of a captured one."""
    if mode == CUDAGraphMode.NONE:
        return nullcontext()
    if mode == CUDAGraphMode.PIECEWISE:
        return without_graphs(runner)  # Its prompts fill the graph.
    if (manager := getattr(runner, "cudagraph_manager", None)) is not None:
        return replaced(
            runner,
            cudagraph_manager=EagerManager(manager),
            model_state=CapturedState(runner.model_state),
        )
    build = runner._build_attention_metadata
    return replaced(
        runner,
        model=runner.model.runnable,
        _build_attention_metadata=partial(build, for_cudagraph_capture=True),
    )


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give an object other attributes for a while."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def drop_graphs(runner: Any) -> None:
    """Free the captured graphs, those of drafts as well, and dispatch to none."""
    if (manager := getattr(runner, "cudagraph_manager", None)) is not None:
        for owner in (manager, *draft_managers(runner.speculator).values()):
            owner.graphs.clear()
            owner._graphs_captured = False
    else:
        runner.cudagraph_dispatcher.cudagraph_mode = CUDAGraphMode.NONE
        CUDAGraphWrapper.clear_all_graphs()
    BreakableCUDAGraphWrapper.clear_all_graphs()
    torch.accelerator.empty_cache()
