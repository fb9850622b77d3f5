# SPDX-License-Identifier: Apache-2.0
"""FP8 products: weights dequantized once to bf16, sums in fp32.

E4M3 times a power of two is exact in bf16, so weights with UE8M0 scales keep their
values. An activation times an fp32 scale is not: it is split into three bf16 parts,
which hold all of its 24 bits. (With two, one FP8 code in 10,000 after the product is
another, and the layer's output is off by 0.3 %.)
"""

import torch

from standins.emulated_xpu.on_cuda.forms.table import device_form
from standins.emulated_xpu.ops.fp8_gemm import as_matrix, finish
from standins.emulated_xpu.wheel.formats import expanded

Key = tuple[int, int, tuple[int, ...]]
_dequantized: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}
"""Weights by place and shape, each with the tensor that keeps its memory."""


def key_of(weight: torch.Tensor) -> Key:
    """Where the weight lies, and its shape."""
    storage = weight.untyped_storage()
    return storage._cdata, weight.storage_offset(), tuple(weight.shape)


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`weight` times its scales in bf16, computed once. For weights that stay where
    they are: their memory is kept."""
    key = key_of(weight)
    if key not in _dequantized:
        values = weight.float() * expanded(scale.float(), weight.shape)
        _dequantized[key] = (weight, values.bfloat16())
    return _dequantized[key][1]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`[M, K] @ [K, N]` of bf16, in fp32."""
    return (
        torch.mm(a, b, out_dtype=torch.float32)
        if not a.is_cpu
        else a.float() @ b.float()
    )


def split_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`[M, K]` in fp32 `@ [K, N]` in bf16: no bit of `a` is lost, sums in fp32."""
    parts = []
    for _ in range(3):
        parts.append(a.bfloat16())
        a = a - parts[-1].float()
    high, middle, low = product(torch.cat(parts), b).chunk(3)
    return high + (middle + low)


@device_form("_xpu_C::fp8_gemm")
def fp8_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    out_dtype: torch.dtype | None,
    A_scale_: torch.Tensor | None,
    B_scale_: torch.Tensor | None,
    bias_: torch.Tensor | None,
) -> torch.Tensor:
    """As the stand-in, but for the order of fp32 sums."""
    if A_scale_ is None or B_scale_ is None:
        raise NotImplementedError("fp8_gemm without scales")
    a = A.float() * expanded(as_matrix(A_scale_), A.shape)
    out = split_product(a, dequantized(B, as_matrix(B_scale_)))
    return finish(out, bias_, out_dtype or torch.bfloat16)


@device_form("_xpu_C::fp8_bmm")
def fp8_bmm(
    A: torch.Tensor,
    B: torch.Tensor,
    out_dtype: torch.dtype | None,
    A_scale_: torch.Tensor | None,
    B_scale_: torch.Tensor | None,
    bias_: torch.Tensor | None,
) -> torch.Tensor:
    """As the stand-in for scales that are powers of two, as vLLM passes them."""
    if A_scale_ is None or B_scale_ is None or bias_ is not None:
        raise NotImplementedError("fp8_bmm without scales or with a bias")
    a = (A.float() * expanded(A_scale_.float(), A.shape)).bfloat16()
    b = dequantized(B, B_scale_)
    if a.is_cpu:
        return (a.float() @ b.float()).to(out_dtype or torch.float32)
    return torch.bmm(a, b, out_dtype=torch.float32).to(out_dtype or torch.float32)
