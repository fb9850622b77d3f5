# SPDX-License-Identifier: Apache-2.0
"""Model runner V2 hands attention the whole block of an image, without its padding."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import layout, model_configs

STATE = "vllm.v1.worker.gpu.model_states.default"


def image(offset: int, embeds: list[int]) -> Any:
    """A placeholder whose tokens are vectors of the tower where `embeds` has a one."""
    inputs = layout.module("vllm.multimodal.inputs")
    return inputs.MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=f"image at {offset}",
        mm_position=inputs.PlaceholderRange(
            offset=offset,
            length=len(embeds),
            is_embed=torch.tensor(embeds, dtype=torch.bool),
        ),
    )


def block(offset: int, rows: int, columns: int) -> Any:
    """An image as V4's processor lays it out: padding, so that the start is the last of
    four tokens, the start, rows with an end each, and the end."""
    pad = 3 - offset % 4
    return image(offset, [0] * (pad + 1) + ([1] * columns + [0]) * rows + [0])


def spans(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], images: Any
) -> Any:
    """What the runner hands attention of one request with `images`."""
    registry = layout.module("vllm.model_executor.models.registry")
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    options = {"dtype": "bfloat16", "block_size": 256, "kv_cache_dtype": "fp8"}
    config = model_configs.engine_config(folder, fields, **options)
    vars(config.model_config)["is_mm_prefix_lm"] = True
    module = layout.module(STATE)
    cache = layout.module("vllm.v1.worker.gpu.mm.encoder_cache").EncoderCache()
    cache.mm_features |= {"text": [], "seen": images}
    state = module.DefaultModelState(
        config, torch.nn.Module(), cache, torch.device("cpu")
    )
    monkeypatch.setattr(module, "build_attn_metadata", lambda **values: values)
    lengths = torch.tensor([8, 400])
    batch = SimpleNamespace(
        req_ids=["text", "seen"],
        num_reqs=2,
        num_tokens=408,
        query_start_loc_np=np.array([0, 8, 408], dtype=np.int32),
        query_start_loc=torch.tensor([0, 8, 408]),
        max_query_len=400,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        dcp_local_seq_lens=None,
        dcp_local_seq_lens_cpu_upper_bound=None,
        positions=torch.arange(408),
        is_prefilling_np=np.ones(2, dtype=bool),
        prompt_lens=lengths,
        idx_mapping_np=np.arange(2),
        fast_prefill=None,
    )
    mode = layout.module("vllm.config.compilation").CUDAGraphMode.NONE
    metadata = state.prepare_attn(batch, mode, (), lengths, [], None)
    return metadata["mm_req_doc_ranges"]


def test_a_span_is_the_whole_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image behind each length of padding, the last wider than the window."""
    images = [block(offset, 3, 5) for offset in (16, 49, 82, 115)]
    images.append(block(150, 10, 13))
    wanted = [(19, 38), (51, 70), (83, 102), (115, 134), (151, 292)]
    assert wanted[-1][1] - wanted[-1][0] >= layout.WINDOW
    got = spans(tmp_path, monkeypatch, model_configs.VISION, images)
    assert got == {0: [], 1: wanted}, f"the spans of the images are {got[1]}"


@pytest.mark.unchanged
def test_other_models_see_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row, and none that is wider than the window."""
    images = [block(16, 2, 5), image(40, [1] * (layout.WINDOW + 1))]
    got = spans(tmp_path, monkeypatch, {}, images)
    assert got == {0: [], 1: [(20, 24), (26, 30)]}
