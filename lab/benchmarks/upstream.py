# SPDX-License-Identifier: Apache-2.0
"""Import single kernel files of a vLLM release without vLLM.

A folder holds the wanted files at their paths inside the release. While `importing` is
active, a `vllm` module that has a file there is imported from it. Every other `vllm`
module is a stand-in: it has Triton and a few helpers, and any further name in it is a
value that is false and does nothing. Packages are stand-ins too, so that importing one
kernel file does not run an `__init__` that needs all of vLLM.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl


class Nothing:
    """A value that is false, can be called and has every attribute."""

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> "Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *args: Any, **kwargs: Any) -> "Nothing":
        return Nothing()

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (object,)

    def __getitem__(self, key: object) -> "Nothing":
        return Nothing()

    def __or__(self, other: object) -> "Nothing":
        return Nothing()

    __ror__ = __or__


class Platform(Nothing):
    """The XPU platform, as far as kernel files ask for it."""

    def is_xpu(self) -> bool:
        return True

    def is_cuda_alike(self) -> bool:
        return False

    def is_rocm(self) -> bool:
        return False

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn


def register_op(
    op_name: str, op_func: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Let `torch.ops.vllm.<op_name>` be the plain function."""
    setattr(torch.ops.vllm, op_name, op_func)


def _known() -> dict[str, dict[str, Any]]:
    fp8 = torch.finfo(torch.float8_e4m3fn)
    return {
        "vllm.triton_utils": {
            "tl": tl,
            "triton": triton,
            "HAS_TRITON": True,
            "LOG2E": 1.4426950408889634,
            "LOGE2": 0.6931471805599453,
        },
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.utils.math_utils": {
            "cdiv": triton.cdiv,
            "next_power_of_2": triton.next_power_of_2,
            "round_up": lambda x, y: triton.cdiv(x, y) * y,
        },
        "vllm.utils.deep_gemm": {
            "mqa_logits_use_mx_scales": lambda: False,
            "get_tma_aligned_size": lambda size, width: (
                triton.cdiv(size, 16 // width) * (16 // width)
            ),
        },
        "vllm.utils.torch_utils": {"direct_register_custom_op": register_op},
        "vllm.model_executor.layers.quantization.utils.quant_utils": {
            "get_fp8_min_max": lambda: (fp8.min, fp8.max)
        },
    }


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots
        self.known = _known()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "vllm":
            return None
        for root in self.roots:
            file = root / (fullname.replace(".", "/") + ".py")
            if file.is_file():
                return importlib.util.spec_from_file_location(fullname, file)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__.update(self.known.get(module.__name__, {}))


@contextmanager
def importing(*roots: Path) -> Iterator[Callable[[str], types.ModuleType]]:
    """Make the kernel files under `roots` importable; the first root wins.

    Yields:
        A function that imports the file at a path inside the release. Its modules stay
        usable afterwards, unless their functions import something when they run;
        `sys.modules` holds none of them.
    """
    finder = _Finder(roots)
    hidden = {name: m for name, m in sys.modules.items() if _is_vllm(name)}
    for name in hidden:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield lambda path: importlib.import_module(
            path.removesuffix(".py").replace("/", ".")
        )
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _is_vllm(name)]:
            del sys.modules[name]
        sys.modules.update(hidden)


def _is_vllm(name: str) -> bool:
    return name.partition(".")[0] == "vllm"
