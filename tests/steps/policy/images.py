# SPDX-License-Identifier: Apache-2.0
"""What does not go with images of V4 Vision."""

from pathlib import Path

import pytest
import torch
from helpers import layout, model_configs
from helpers.published import checked
from vllm.config import KVTransferConfig

from . import starts


@pytest.mark.parametrize(
    "option", ["--kv-transfer-config", "--enable-batch-sharded-sampling"]
)
def test_what_does_not_go_with_images(option: str, tmp_path: Path) -> None:
    config = starts.configured(tmp_path, model_configs.VISION)
    if option == "--kv-transfer-config":
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both"
        )
    else:
        config.parallel_config.enable_batch_sharded_sampling = True
    end = starts.end(lambda: starts.check_again(config))
    assert f"{option} is not supported with images" in end, f"the start ends with {end}"


@pytest.mark.unchanged
def test_text_alone_is_transferred(tmp_path: Path) -> None:
    transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
    assert starts.configured(tmp_path, {}, kv_transfer_config=transfer)


def test_every_tensor_of_the_tower_has_its_shape(tmp_path: Path) -> None:
    """As it loads: whole, and refused by its name with a row more or less."""
    config = starts.configured(tmp_path, model_configs.VISION)
    registry = layout.module("vllm.model_executor.models.registry").ModelRegistry
    kind = registry.models["DeepseekV4ForConditionalGeneration"].load_model_cls()
    utilities = layout.module("vllm.utils.torch_utils")
    with (
        model_configs.current(config),
        layout.worker(),
        utilities.set_default_torch_dtype(torch.bfloat16),
    ):
        model = kind(vllm_config=config)
    held = {
        name: parameter.shape
        for name, parameter in model.named_parameters()
        if name.startswith(("vision.", "aligner.", "image_"))
    }
    assert held
    for name, shape in held.items():
        whole = torch.ones(shape)
        model.load_weights(checked(model, [(name, whole)]))
        for wrong in (whole[:-1], torch.cat((whole, whole[:1]))):
            with pytest.raises(ValueError, match=f"{name} is .*; XPU reads"):
                model.load_weights(checked(model, [(name, wrong)]))
    name = "layers.1.attn.wq_a.scale"
    with pytest.raises(ValueError, match=f"{name} is int32"):
        model.load_weights(checked(model, [(name, torch.ones(1, 2).int())]))
