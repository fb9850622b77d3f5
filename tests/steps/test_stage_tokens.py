# SPDX-License-Identifier: Apache-2.0
"""A later pipeline stage gets the token ids of a model that says it needs them.

The runner computes one eager step of its second stage, of whose parts none but the
batch, the buffers and the model are real here.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from helpers import layout, model_configs

RUNNER = "vllm.v1.worker.gpu.model_runner"
TOKENS = 5


class Ended(Exception):
    """The model was called; what comes after a step does not matter here."""


class Model:
    def __init__(self, asks: bool) -> None:
        self.requires_raw_input_tokens = asks

    def __call__(self, **inputs: Any) -> None:
        raise Ended(inputs)


def inputs_of_a_later_stage(asks: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    runner = layout.module(RUNNER)
    batches = layout.module("vllm.v1.worker.gpu.input_batch")
    mode = layout.module("vllm.config").CUDAGraphMode.NONE
    batch = SimpleNamespace(
        num_tokens=TOKENS,
        num_reqs=1,
        num_ubatches=1,
        num_active_loras=0,
        max_query_len=None,
        cg_mode=mode,
    )
    monkeypatch.setattr(
        runner, "dispatch_cg_and_sync_dp", lambda *_, **__: (batch, None)
    )
    received = {"hidden_states": torch.ones(TOKENS, 8)}
    self = MagicMock(
        is_first_pp_rank=False,
        lora_config=None,
        pcp_manager=None,
        dcp_size=1,
        is_encoder_decoder=False,
        vllm_config=model_configs.vllm_config(),
        input_buffers=batches.InputBuffers(8, 64, torch.device("cpu")),
        intermediate_tensors=SimpleNamespace(tensors=received),
        model=Model(asks),
    )
    self.gather_batch_req_state.return_value = None, None
    self.model_state.prepare_inputs.return_value = {}
    output = MagicMock(num_scheduled_tokens={"0": TOKENS})
    output.total_num_scheduled_tokens = TOKENS
    with pytest.raises(Ended) as end:
        runner.GPUModelRunner.execute_model(
            self,
            output,
            SimpleNamespace(tensors=received),
            dummy_run=True,
            skip_attn_for_dummy_run=True,
            is_profile=True,
        )
    return end.value.args[0]


def test_a_model_that_needs_ids_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of_a_later_stage(True, monkeypatch)
    assert inputs["input_ids"] is not None, "a later stage gets no token ids"
    assert inputs["input_ids"].shape == (TOKENS,)
    assert inputs["intermediate_tensors"] is not None


@pytest.mark.unchanged
def test_other_models_get_none_on_all_other_platforms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = inputs_of_a_later_stage(False, monkeypatch)
    assert inputs["input_ids"] is None
    assert inputs["intermediate_tensors"] is not None
