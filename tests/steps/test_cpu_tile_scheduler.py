# SPDX-License-Identifier: Apache-2.0
"""The CPU backend plans no tiles, for whichever kinds of layer there are."""

import pytest
from helpers import batch_metadata, model_configs


@pytest.mark.any_platform
def test_window_metadata_is_built() -> None:
    config = model_configs.vllm_config()
    builder = batch_metadata.cpu_window_builder(config)
    with model_configs.current(config):
        metadata = builder.build(
            0, batch_metadata.common_metadata((8, 13, 6), (1, 1, 1))
        )
    plans = {
        name: value
        for name, value in vars(metadata).items()
        if name.startswith("tile_sched")
    }
    assert plans
    assert set(plans.values()) == {None}


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_known_kinds_have_no_plan() -> None:
    plans = batch_metadata.cpu_window_builder(
        model_configs.vllm_config()
    ).build_tile_scheduler(3)
    assert set(plans.values()) == {None}
    assert {"swaonly", "c4a", "c128a"} <= set(plans)
