# SPDX-License-Identifier: Apache-2.0
"""Images of requests, and the spans of them that model runner V2 hands attention."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from . import layout, model_configs

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


def state_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cache: Any, sees: bool = True
) -> Any:
    """The runner's state of V4 Vision, or of a text model unless it `sees`, whose stage
    has the encoder `cache` or None."""
    registry = layout.module("vllm.model_executor.models.registry")
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    options = {"dtype": "bfloat16", "block_size": 256, "kv_cache_dtype": "fp8"}
    config = model_configs.engine_config(folder, {}, **options)
    if sees:
        # Not from the start: XPU registers no V4 Vision before `vision-model`.
        model_configs.take_images(config)
    vars(config.model_config)["is_mm_prefix_lm"] = True
    module = layout.module(STATE)
    monkeypatch.setattr(module, "build_attn_metadata", lambda **values: values)
    return module.DefaultModelState(
        config, torch.nn.Module(), cache, torch.device("cpu")
    )


def handed(state: Any) -> Any:
    """What attention gets in a step of the requests "text" and "seen"."""
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
        pcp=None,
    )
    mode = layout.module("vllm.config.compilation").CUDAGraphMode.NONE
    metadata = state.prepare_attn(batch, mode, (), lengths, [], None)
    return metadata["mm_req_doc_ranges"]


def encoder_cache(images: Any) -> Any:
    """The first stage's, of a request without images and one with them."""
    cache = layout.module("vllm.v1.worker.gpu.mm.encoder_cache").EncoderCache()
    cache.mm_features |= {"text": [], "seen": images}
    return cache
