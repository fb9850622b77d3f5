# SPDX-License-Identifier: Apache-2.0
"""Stand-ins that whole engines need and no step's test does.

They are not in `emulated_xpu/`, every change of which repeats the tests of all steps.
`engine.py` imports this module before vLLM asks for the ops. It adds grouped products
of FP8 blocks and the generator of the device's random numbers, makes the index of a
`tl.range` castable, as upstream's top-k needs it, and gives the interpreter log1p, as
the random numbers of v0.28.0 need it.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter

from standins.emulated_xpu import ops  # noqa: F401  (registers what is extended here)
from standins.emulated_xpu.device_api import Grant
from standins.emulated_xpu.wheel.formats import expanded
from standins.emulated_xpu.wheel.implementations import IMPLEMENTATIONS

GROUPED_GEMM = "_xpu_C::cutlass_grouped_gemm_interface"
_of_four_bits = IMPLEMENTATIONS[GROUPED_GEMM]


def grouped_gemm(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Besides the formats of four bits: e4m3 weights `[E, K, N]` whose blocks have fp32
    scales, `[E, K / b, N / b]`, as versions from 0.1.13 on take them."""
    names = ("ptr_A", "ptr_A_scale", "ptr_B", "ptr_B_scale", "ptr_bias", "ptr_D")
    given = dict(zip((*names, "rows_per_expert"), args, strict=False)) | kwargs
    weights: Any = given.get("ptr_B")
    scales: Any = given.get("ptr_B_scale")
    if weights is None or weights.dtype != torch.float8_e4m3fn:
        return _of_four_bits(*args, **kwargs)
    by_blocks = scales is not None and scales.ndim == 3
    if not by_blocks or scales.dtype != torch.float32 or given["ptr_bias"] is not None:
        raise NotImplementedError("FP8 experts on the emulated XPU: blocks alone")
    if given["ptr_A_scale"] is not None:
        raise NotImplementedError("FP8 experts on the emulated XPU: bf16 activations")
    rows, out = given["ptr_A"].float(), given["ptr_D"]
    start = 0
    for expert, count in enumerate(given["rows_per_expert"].tolist()):
        weight = weights[expert].float()
        weight = weight * expanded(scales[expert], weight.shape)
        end = start + count
        out[start:end] = (rows[start:end] @ weight).to(out.dtype)
        start = end
    return out.view_as(out)


IMPLEMENTATIONS[GROUPED_GEMM] = grouped_gemm


class Generator:
    """Stands for a device's generator, whose state is a seed and an offset, 16 bytes.

    vLLM reads them, hands them to the op, and moves the offset on.
    """

    def __init__(self) -> None:
        self.state = torch.zeros(2, dtype=torch.int64)

    def get_state(self) -> torch.Tensor:
        return self.state.clone().view(torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        self.state = state.clone().view(torch.int64)


class Generators:
    """Stands for `torch.xpu.default_generators`: one device, and a tensor of the CPU
    does not number it."""

    def __init__(self) -> None:
        self.only = Generator()

    def __getitem__(self, index: int | None) -> Generator:
        return self.only


GENERATORS = Grant(
    "torch.xpu.default_generators",
    "a generator for each device",
    "vLLM's sampler of XPU gives its op the seed; without a device there is none",
    Generators(),
)


class Index(int):
    """The index of a loop, which the interpreter has as an int of Python."""

    def to(self, dtype: Any) -> Any:
        return interpreter._implicit_cvt(int(self)).to(dtype)


def castable_indices(original: Callable[..., None]) -> Callable[..., None]:
    """Triton's `_patch_lang_core`, and a `tl.range` whose indices can be cast."""

    @functools.wraps(original)
    def patch(lang: Any, scope: Any) -> None:
        original(lang, scope)
        plain = lang.range

        def indices(*args: Any, **kwargs: Any) -> Iterator[Index]:
            return map(Index, plain(*args, **kwargs))

        scope.set_attr(lang, "range", indices)

    return patch


def log1p(x: Any) -> Any:
    """log(1 + x) of a block, which the interpreter makes None as all of libdevice."""
    handle = interpreter.TensorHandle(np.log1p(x.handle.data), x.handle.dtype)
    return tl.core.tensor(handle, x.type)


def provide() -> None:
    """Provide what the ops do not: after the platform, before the first launch."""
    GENERATORS.provide()
    interpreter._patch_lang_core = castable_indices(interpreter._patch_lang_core)
    libdevice.log1p = log1p
