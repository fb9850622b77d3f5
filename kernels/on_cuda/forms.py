# SPDX-License-Identifier: Apache-2.0
"""What takes the place of what in the modules of `xpu_dsv4`."""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from ..xpu_dsv4._launch import has_packed_rows
from ..xpu_dsv4._output import Fp8Output
from ..xpu_dsv4._pages import HEAD_DIM
from . import configs
from ._decode_kernel import _decode_kernel
from ._hopper_decode import hopper_decode_kernel
from ._hopper_few_heads import few_heads_kernel
from ._hopper_prefill import hopper_prefill_kernel
from ._prefill_kernel import WGMMA_ROWS, _prefill_kernel

FP8_CAPABILITY = (8, 9)
"""Least compute capability of NVIDIA GPUs that convert e4m3."""
HOPPER = (9, 0)
"""Compute capability of the GPUs that run the forms in Gluon."""
_KV_STRIDE = 11
"""Place of `kv_stride` among the arguments of the prefill kernel."""
_PREFILL_SCALES, _DECODE_SCALES = 16, 25
"""Places of `scales_ptr`, which is None where attention ends in bf16."""


@cache
def _hopper_programs(device: torch.device) -> int:
    """Multiprocessors of a Hopper GPU, each of which holds one program; 0 elsewhere."""
    if device.type != "cuda" or torch.version.cuda is None:
        return 0
    if torch.cuda.get_device_capability(device) != HOPPER:
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _chosen(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in (*names, "BLOCK_H", "BLOCK_N", "num_warps")}


class _Prefill:
    """The prefill kernel: in Gluon to bf16 on Hopper, where keys lie without gaps."""

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: Any) -> Any:
            q, kv = arguments[:2]
            programs = _hopper_programs(q.device)
            to_bf16 = arguments[_PREFILL_SCALES] is None
            if programs and to_bf16 and has_packed_rows(kv):
                given = (grid[0], *arguments[:_PREFILL_SCALES])
                chosen = _chosen(options, "HAS_LENS", "HAS_SINK")
                if options["BLOCK_H"] >= WGMMA_ROWS:
                    return hopper_prefill_kernel[grid](*given, **chosen)
                return few_heads_kernel[(min(grid[0], programs),)](*given, **chosen)
            packed = arguments[_KV_STRIDE] == HEAD_DIM
            return _prefill_kernel[grid](*arguments, **options, PACKED_KEYS=packed)

        return launch


class _Decode:
    """The decode kernel: in Gluon to bf16 or partials of 64 heads on Hopper."""

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: Any) -> Any:
            programs = _hopper_programs(arguments[0].device)
            to_bf16 = arguments[_DECODE_SCALES] is None
            if programs and to_bf16 and options["BLOCK_H"] >= WGMMA_ROWS:
                names = ("KV_BLOCK_SIZE", "SWA_BLOCK_SIZE", "HAS_TOPK", "HAS_SINK")
                return hopper_decode_kernel[grid](
                    *arguments[:_DECODE_SCALES],
                    **_chosen(options, *names, "SPLIT"),
                )
            return _decode_kernel[grid](*arguments, **options)

        return launch


def _in_whole_waves(decode: Callable[..., None]) -> Callable[..., None]:
    """Decode in two calls where some tokens would be a small last wave of programs: the
    second call shares their keys."""

    def run(
        q: torch.Tensor,
        kv_cache: torch.Tensor | None,
        swa_kv_cache: torch.Tensor,
        swa_only: bool,
        topk_indices: torch.Tensor | None,
        topk_lens: torch.Tensor | None,
        swa_indices: torch.Tensor,
        swa_lens: torch.Tensor,
        attn_sink: torch.Tensor | None,
        softmax_scale: float,
        head_dim: int,
        nope_head_dim: int,
        rope_head_dim: int,
        out: torch.Tensor | Fp8Output,
        *,
        workspace: torch.Tensor | None = None,
    ) -> None:
        num_tokens, num_heads = q.shape[:2]
        topk = 0 if swa_only or topk_indices is None else topk_indices.shape[-1]
        max_keys = topk + swa_indices.shape[-1]
        whole = configs.tokens_of_whole_waves(num_tokens, num_heads, max_keys)
        for tokens in (slice(whole), slice(whole, None))[: 1 + (whole < num_tokens)]:
            decode(
                q[tokens],
                kv_cache,
                swa_kv_cache,
                swa_only,
                None if topk_indices is None else topk_indices[tokens],
                None if topk_lens is None else topk_lens[tokens],
                swa_indices[tokens],
                swa_lens[tokens],
                attn_sink,
                softmax_scale,
                head_dim,
                nope_head_dim,
                rope_head_dim,
                out[tokens],
                workspace=workspace,
            )

    return run


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
    name = "xpu_sparse_decode_fp8"
    return [
        (decode, "_decode_kernel", _Decode()),
        (decode, name, _in_whole_waves(getattr(decode, name))),
        (decode, "decode_config", configs.decode_config),
        (config, "decode_config", configs.decode_config),
        (prefill, "_prefill_kernel", _Prefill()),
        (prefill, "prefill_config", configs.prefill_config),
        (merge, "merge_tile", configs.merge_tile),
    ]


def use(package: str = "kernels.xpu_dsv4") -> None:
    """Let the functions of `package` run CUDA's forms from now on.

    Raises:
        RuntimeError: as `forms`.

    """
    for module, name, form in forms(package):
        original = getattr(module, name)
        setattr(module, name, form)
        # vLLM's modules that were imported before have the name, too.
        for path, caller in list(sys.modules.items()):
            if path.startswith("vllm.") and getattr(caller, name, None) is original:
                setattr(caller, name, form)
