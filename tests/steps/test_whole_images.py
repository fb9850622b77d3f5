# SPDX-License-Identifier: Apache-2.0
"""An image whose tokens see each other is computed in one step, whatever of the prompt
was computed before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import layout, model_configs

PAGE = 256
WINDOW = (64, 128)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration of a server whose model has such images."""
    registry = layout.module("vllm.model_executor.models.registry")
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    options = {"dtype": "bfloat16", "block_size": PAGE, "kv_cache_dtype": "fp8"}
    config = model_configs.engine_config(tmp_path, {}, max_model_len=2048, **options)
    vars(config.model_config)["is_mm_prefix_lm"] = True
    config.scheduler_config.is_multimodal_model = True
    layout.module("vllm.platforms").current_platform.check_and_update_config(config)
    return config


def scheduler_of(config: Any) -> Any:
    """A scheduler of full pages beside a window."""
    interface = layout.module("vllm.v1.kv_cache_interface")
    heads = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8}
    specs = {
        "pages": interface.MLAAttentionSpec(block_size=PAGE, **heads),
        "window": interface.SlidingWindowMLASpec(
            block_size=WINDOW[0], sliding_window=WINDOW[1], **heads
        ),
    }
    config.cache_config.num_gpu_blocks = 256
    return layout.module("vllm.v1.core.sched.scheduler").Scheduler(
        config,
        interface.KVCacheConfig(
            num_blocks=256,
            kv_cache_tensors=[],
            kv_cache_groups=[
                interface.KVCacheGroupSpec([name], spec) for name, spec in specs.items()
            ],
        ),
        layout.module("vllm.v1.structured_output").StructuredOutputManager(config),
        block_size=PAGE,
        hash_block_size=64,
    )


def request(name: str, tokens: int, images: list[tuple[int, int]]) -> Any:
    """A prompt with images, each at a position and of a length."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=f"image {number}",
            mm_position=PlaceholderRange(offset=offset, length=length),
        )
        for number, (offset, length) in enumerate(images)
    ]
    return Request(
        request_id=name,
        prompt_token_ids=list(range(tokens)),
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        mm_features=features,
        block_hasher=get_request_block_hasher(64, sha256),
    )


def taken(config: Any, images: list[tuple[int, int]], whole: bool = True) -> int:
    """How many of 1,100 tokens come from the cache when they are sent again."""
    config.scheduler_config.disable_chunked_mm_input = whole
    return taken_from(scheduler_of(config).kv_cache_manager, images)


def taken_from(cache: Any, images: list[tuple[int, int]]) -> int:
    """As `taken`, of a manager of the cache."""
    first = request("first", 1100, images)
    assert cache.allocate_slots(first, 1100) is not None
    found = cache.get_computed_blocks(request("second", 1100, images))
    return int(found[1])


@pytest.mark.parametrize(("computed", "asked"), [(40, 90), (99, 60), (100, 59)])
def test_no_chunk_ends_in_an_image(config: Any, computed: int, asked: int) -> None:
    """There is one of 60 tokens after 100, and room for what a tower gives."""
    scheduler = scheduler_of(config)
    encoder = layout.module("vllm.v1.core.encoder_cache_manager")
    scheduler.encoder_cache_manager = encoder.EncoderCacheManager(cache_size=1 << 20)
    prompt = request("prompt", 200, [(100, 60)])
    found = scheduler._try_schedule_encoder_inputs(prompt, computed, asked, 1 << 20)
    end = computed + found[1]
    assert end == 100, f"an image is cut by a chunk that ends after {end} tokens"


@pytest.mark.parametrize(
    ("images", "wanted"),
    [
        ([(900, 170)], 768),
        ([(700, 380)], 512),
        ([(0, 1030)], 0),
        ([(200, 100), (600, 480)], 512),
        ([(200, 300), (505, 590)], 0),
    ],
)
def test_no_hit_ends_in_an_image(
    config: Any, images: list[tuple[int, int]], wanted: int
) -> None:
    found = taken(config, images)
    assert found == wanted, f"an image is cut: {found} tokens are taken from the cache"


@pytest.mark.unchanged
@pytest.mark.parametrize("images", [[], [(100, 200)], [(700, 324), (1024, 70)]])
def test_a_hit_between_images_stays(config: Any, images: list[tuple[int, int]]) -> None:
    assert taken(config, images) == 1024


@pytest.mark.unchanged
def test_other_models_hit_inside_an_image(config: Any) -> None:
    """Where its tokens do not see each other."""
    vars(config.model_config)["is_mm_prefix_lm"] = False
    assert taken(config, [(900, 170)]) == 1024


@pytest.mark.unchanged
def test_a_cache_of_which_nobody_asks_it_hits_inside_an_image(config: Any) -> None:
    scheduler = scheduler_of(config)
    cache = type(scheduler.kv_cache_manager)(
        scheduler.kv_cache_config,
        max_model_len=2048,
        scheduler_block_size=PAGE,
        hash_block_size=64,
    )
    assert taken_from(cache, [(900, 170)]) == 1024


@pytest.mark.unchanged
@pytest.mark.parametrize(
    ("sees_images_whole", "takes_images"),
    [(False, True), (True, False)],
    ids=["another model", "text alone"],
)
def test_servers_of_no_such_images_may_cut_inputs(
    sees_images_whole: bool, takes_images: bool, config: Any
) -> None:
    """A server for text alone, too, though its model would see images whole."""
    vars(config.model_config)["is_mm_prefix_lm"] = sees_images_whole
    config.scheduler_config.is_multimodal_model = takes_images
    config.scheduler_config.disable_chunked_mm_input = False
    layout.module("vllm.platforms").current_platform.check_and_update_config(config)
    assert not config.scheduler_config.disable_chunked_mm_input


@pytest.mark.unchanged
def test_a_configuration_may_have_no_model() -> None:
    config = layout.module("vllm.config").VllmConfig()
    assert config.model_config is None


@pytest.mark.unchanged
def test_an_image_that_may_be_split_stays(config: Any) -> None:
    assert taken(config, [(900, 170)], whole=False) == 1024
