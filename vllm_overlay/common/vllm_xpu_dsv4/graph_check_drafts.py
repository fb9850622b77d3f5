# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Drafts of the second runner's speculator, by graphs or by what these captured."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from vllm.config import CUDAGraphMode
from vllm.v1.worker.workspace import use_workspace_lane
from vllm_xpu_dsv4.graph_check_twins import replaced

# The function that each manager of a speculator captures.
CAPTURED_BY = {
    "prefill_cudagraph_manager": "_prefill",
    "decode_cudagraph_manager": "_generate_draft",
    "query_cudagraph_manager": "_generate_draft",
}


class Drafts(NamedTuple):
    """What a speculator proposed: tokens, `[num_reqs, num_speculative_tokens]`, and a
    row of its hidden states for each request in float32."""

    tokens: torch.Tensor
    rows: torch.Tensor

    def error(self, expected: "Drafts") -> float:
        """As `row_error`, of requests with the same tokens: rows behind others are
        others. Infinity if there is no such request."""
        same = (self.tokens == expected.tokens).all(dim=1)
        if not same.any():
            return float("inf")
        return row_error(self.rows[same], expected.rows[same])


def row_error(rows: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance of a row from the expected one, relative to its norm."""
    distances = (rows - expected).norm(dim=1)
    errors = distances / expected.norm(dim=1)
    # NaN is largest: it is no agreement.
    errors = errors.where(distances != 0, 0.0).nan_to_num(nan=float("inf"))
    return float(errors.max())


def num_draft_tokens(runner: Any) -> int:
    """How many tokens a request's drafts have, on every pipeline stage."""
    config = runner.vllm_config.speculative_config
    return 0 if config is None else config.num_speculative_tokens


class DraftGraphs:
    """The graphs of a runner's speculator, and their eager twins."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.speculator: Any = getattr(runner, "speculator", None)
        # The full graphs that twins stood for, by the manager's name and the tokens.
        self.sizes: set[tuple[str, int]] = set()

    @property
    def managers(self) -> dict[str, Any]:
        """The managers that have graphs, by name."""
        found = {name: getattr(self.speculator, name, None) for name in CAPTURED_BY}
        return {name: m for name, m in found.items() if m and m._graphs_captured}

    def descs(self, mode: CUDAGraphMode) -> list[tuple[str, Any]]:
        """The captured graphs of a mode, each with its manager's name."""
        return [
            (name, desc)
            for name, manager in self.managers.items()
            for desc in manager._capture_descs.get(mode, ())
        ]

    def missed(self) -> list[str]:
        """The full graphs that no twin stood for, in words."""
        return [
            f"graph of {name} of {desc.num_tokens} tokens"
            for name, desc in self.descs(CUDAGraphMode.FULL)
            if (name, desc.num_tokens) not in self.sizes
        ]

    @contextmanager
    def replaced_by_twins(self) -> Iterator[None]:
        """Run what graphs captured: as many requests as theirs, the longest tables."""
        with ExitStack() as stack:
            for name, manager in self.managers.items():
                twin = EagerTwin(self, name, manager)
                methods: dict[str, Any] = {CAPTURED_BY[name]: twin.run}
                if CAPTURED_BY[name] == "_generate_draft":
                    methods["_build_attn_metadata"] = twin.build_captured
                stack.enter_context(replaced(manager, dispatch=twin.dispatch))
                stack.enter_context(replaced(self.speculator, **methods))
            yield

    def propose(self, state: Any, spec_tokens: int, sampled_ids: list[int]) -> Drafts:
        """Drafts after a step, of which requests rejected none up to all in turn, and
        sampled tokens as given."""
        runner, batch = self.runner, state.input_batch
        hidden_states = state.hidden_states
        # DeepSeek-V4's MTP takes what the model had before its head.
        get = getattr(runner.model, "get_mtp_target_hidden_states", None)
        if get is not None and (before_head := get()) is not None:
            hidden_states = before_head[: len(hidden_states)]
        count, device = batch.num_reqs, batch.idx_mapping.device
        numbers = torch.arange(count, dtype=torch.int32, device=device)
        sampled = torch.zeros_like(runner.req_states.last_sampled_tokens)
        sampled.view(-1)[batch.idx_mapping] = torch.tensor(sampled_ids).to(sampled)
        sampling = runner.sampler.sampling_states
        # Named by what the data-parallel ranks of each release agree on.
        agreed = {n: v for n, v in state._asdict().items() if n.startswith("dp_sync")}
        with use_workspace_lane(runner._draft_workspace_lane):
            tokens = self.speculator.propose(
                batch,
                state.attn_metadata,
                state.slot_mappings_by_layer,
                hidden_states,
                state.aux_hidden_states,
                torch.ones_like(numbers),
                numbers % (spec_tokens + 1),
                sampled,
                runner.req_states.next_prefill_tokens,
                sampling.temperature.gpu,
                sampling.seeds.gpu,
                **agreed,
            )
        rows = self.speculator.hidden_states[:count]
        return Drafts(tokens.clone(), rows.float().clone())


class EagerTwin:
    """What the graphs of one manager captured, in the place of a replay."""

    def __init__(self, graphs: DraftGraphs, name: str, manager: Any) -> None:
        self.graphs, self.name = graphs, name
        self.speculator = graphs.speculator
        self.padded = manager.dispatch
        self.function = getattr(self.speculator, CAPTURED_BY[name])
        self.build = self.speculator._build_attn_metadata

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """The padding of a graph, and no graph."""
        self.desc = self.padded(*args, **kwargs)
        return replace(self.desc, cg_mode=CUDAGraphMode.NONE)

    def run(self, num_reqs: int, *args: Any, **given: Any) -> None:
        if self.desc.cg_mode == CUDAGraphMode.FULL:
            self.graphs.sizes.add((self.name, self.desc.num_tokens))
        self.function(self.desc.num_reqs or num_reqs, *args, **given)

    def build_captured(self, *, batch_desc: Any, **given: Any) -> Any:
        if self.desc.cg_mode == CUDAGraphMode.FULL:
            batch_desc = self.desc
            self.speculator.draft_max_seq_len = self.speculator.max_model_len
        return self.build(batch_desc=batch_desc, **given)
