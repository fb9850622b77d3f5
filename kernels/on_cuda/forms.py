# SPDX-License-Identifier: Apache-2.0
"""What takes the place of what in the modules of `xpu_dsv4`."""

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from ..xpu_dsv4._pages import HEAD_DIM
from . import configs
from ._decode_kernel import _decode_kernel
from ._prefill_kernel import _prefill_kernel

FP8_CAPABILITY = (8, 9)
"""Least compute capability of NVIDIA GPUs that convert e4m3."""
_KV_STRIDE = 11
"""Place of `kv_stride` among the arguments of the prefill kernel."""


class _PackedPrefill:
    """The prefill kernel, told whether its keys lie without gaps."""

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: Any) -> Any:
            packed = arguments[_KV_STRIDE] == HEAD_DIM
            return _prefill_kernel[grid](*arguments, **options, PACKED_KEYS=packed)

        return launch


def forms(package: str = "kernels.xpu_dsv4") -> list[tuple[ModuleType, str, Any]]:
    """Modules of `package`, a name in each, and the form for CUDA of what it names.

    Raises:
        RuntimeError: the GPU does not convert e4m3 by an instruction.

    """
    if torch.cuda.is_available() and torch.version.cuda is not None:
        capability = torch.cuda.get_device_capability()
        if capability < FP8_CAPABILITY:
            raise RuntimeError(
                f"compute capability {capability}: CUDA's forms of the kernels need"
                f" {FP8_CAPABILITY}, or leave them out"
            )
    decode, prefill, merge, config = (
        import_module(f"{package}.{name}")
        for name in ("sparse_decode", "sparse_prefill", "_merge", "_decode_config")
    )
    return [
        (decode, "_decode_kernel", _decode_kernel),
        (decode, "decode_config", configs.decode_config),
        (config, "decode_config", configs.decode_config),
        (prefill, "_prefill_kernel", _PackedPrefill()),
        (prefill, "prefill_config", configs.prefill_config),
        (merge, "merge_tile", configs.merge_tile),
    ]


def use(package: str = "kernels.xpu_dsv4") -> None:
    """Let the functions of `package` run CUDA's forms from now on.

    Raises:
        RuntimeError: as `forms`.

    """
    for module, name, form in forms(package):
        setattr(module, name, form)
