# SPDX-License-Identifier: Apache-2.0
"""Run inside an installed vLLM: says as JSON how far the emulated XPU carries it.

`python emulated_probe.py entry-point FILE` lets vLLM find the platform by itself,
`python emulated_probe.py pytest-plugin FILE` imports the plugin first; the answer
goes to FILE.
"""

import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

RATIOS = (0, 4, 128)
CUDA = (
    "CUDAGraph",
    "Event",
    "Stream",
    "current_stream",
    "default_stream",
    "graph_pool_handle",
    "is_current_stream_capturing",
    "mem_get_info",
    "synchronize",
)
"""Names of torch.cuda that raise in a torch without CUDA."""


def outcome(function: Callable[[], Any]) -> str:
    """`ok`, or the exception with the file in which it was raised."""
    try:
        function()
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} [{place.filename}]"
    return "ok"


def probe() -> dict[str, Any]:
    """The platform, each module's import, and each kind of layer's construction."""
    import torch
    from vllm.platforms import current_platform
    from vllm.platforms.xpu import XPUPlatform

    platform = type(current_platform)
    found: dict[str, Any] = {
        "platform": platform.__name__,
        "own_answers": sorted(
            name
            for name, value in vars(XPUPlatform).items()
            if not name.startswith("_")
            and inspect.getattr_static(platform, name) is not value
        ),
        "is_xpu": current_platform.is_xpu(),
        "device_type": current_platform.device_type,
    }
    from helpers import layout

    found["layout"] = {"xpu_folder": layout.WITH_XPU_FOLDER}
    found["imports"] = {
        key: outcome(partial(importlib.import_module, getattr(layout, key)))
        for key in ("ATTENTION", "COMPRESSOR", "MHC", "MODEL", "MTP")
    }
    found["layers"] = {}
    for ratio in RATIOS:
        found["layers"][ratio] = outcome(partial(check_layer, ratio))
    # After all these imports, and outside of what a worker's runner replaces.
    found["cuda"] = {
        name: outcome(getattr(torch.cuda, name)).partition(" [")[0] for name in CUDA
    }
    return found


def check_layer(ratio: int) -> None:
    """Build one layer and look whether it is of the kind that was asked for."""
    from helpers import model_configs, model_layers

    layer = model_layers.attention_layer(model_configs.vllm_config(), ratio)
    assert layer.compress_ratio == max(ratio, 1), layer.compress_ratio
    assert (layer.indexer is not None) == (ratio == 4), layer.indexer


if __name__ == "__main__":
    if sys.argv[1] == "pytest-plugin":
        importlib.import_module("standins.emulated_xpu.pytest_plugin")
    Path(sys.argv[2]).write_text(json.dumps(probe()))
