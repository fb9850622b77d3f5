# SPDX-License-Identifier: Apache-2.0
"""What does not go with images of V4 Vision."""

from pathlib import Path

import pytest
from helpers import model_configs
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
