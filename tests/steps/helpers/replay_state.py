# SPDX-License-Identifier: Apache-2.0
"""The state of V4.1's model that chooses the rows of its later layers, and batches."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from . import layout


def kind() -> Any:
    model = layout.module("vllm.models.deepseek_v41.xpu.model")
    server = object.__new__(model.DeepseekV41XPULLMForCausalLM)
    server.__dict__["specialized_decode_config"] = None
    found = server.get_model_state_cls()
    assert hasattr(found, "_starts_of"), "later layers compute all rows"
    return found


def state_of(starts: list[int]) -> Any:
    """A model state that says which rows it chose of a batch, and from where on their
    windows have keys."""
    state = object.__new__(kind())
    state.decoder_replay_layers = SimpleNamespace(replay_batch="the last step's")
    state._later_start_np = np.array(starts, dtype=np.int32)
    state._kept_rows, state.vllm_config = torch.arange(99_999), None
    chosen = {}

    def keep_rows(batch: Any, slots: Any, start: Any, lens: Any, count: int) -> Any:
        chosen["rows"] = lens.tolist()
        assert lens.sum() == count
        return batch, slots

    def keep_starts(batch: Any, start: Any, *rest: Any) -> Any:
        chosen["starts"] = start.tolist()

    state._kept_input_batch, state._metadata_of = keep_rows, keep_starts
    return state, chosen


def batch_of(rows: list[tuple[int, int, bool]]) -> Any:
    """Of each request how many tokens it has in the step, how many up to its end, and
    whether it still reads its prompt."""
    counts, lens, reads = zip(*rows, strict=True)
    return SimpleNamespace(
        num_reqs=len(rows),
        idx_mapping_np=np.arange(len(rows)),
        is_prefilling_np=np.array(reads),
        query_start_loc_np=np.cumsum([0, *counts, 0]),  # padded
        seq_lens_cpu_upper_bound=torch.tensor(lens),
    )
