# SPDX-License-Identifier: Apache-2.0
"""Run the shipped wrappers on CPU tensors through Intel's own lowering.

While `lowering` is active, a launch goes through triton-xpu to the SPIR-V that it makes
for an Intel GPU, dpas layouts and 2-dim block loads included, and Intel's OpenCL
runtime executes that on the CPU. Wrappers choose the configuration of an XPU.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from lab.aot.calls import record
from lab.aot.compiler.compile import SpirvModule, to_spirv

from .opencl import Cpu

ALIGNMENT = 16
GPU = {
    "max_work_group_size": 1024,
    "max_num_sub_groups": 64,
    "sub_group_sizes": [16, 32],
    "has_fp64": True,
    "has_subgroup_matrix_multiply_accumulate": True,
    "has_subgroup_matrix_multiply_accumulate_tensor_float32": True,
    "has_subgroup_2d_block_io": True,
    "has_bfloat16_conversions": True,
}
"""Properties of a Battlemage GPU, as ocloc reports them."""


@dataclass
class Ran:
    """One launch that was executed.

    Attributes:
        configuration: its compile-time parameters.
        compile_seconds: Triton's and the CPU compiler's; little where the program was
            kept.
        test: what launched it.
        error: of that test, as its comparison gave it.
    """

    kernel: str
    configuration: dict[str, Any]
    warps: int
    grid: tuple[int, ...]
    compile_seconds: float
    seconds: float
    module: SpirvModule = field(repr=False)
    test: str = ""
    error: str = ""

    @property
    def shown(self) -> str:
        """The parameters by name, without those that are None."""
        return ", ".join(
            f"{name} {value}"
            for name, value in self.configuration.items()
            if name.isupper() and value is not None
        )

    def row(self) -> dict[str, str]:
        """What `--rows` writes."""
        return {
            "kernel": self.kernel,
            "configuration": self.shown,
            "sub-groups": str(self.warps),
            "grid": " x ".join(map(str, self.grid)),
            "error": self.error,
            "compiled in s": f"{self.compile_seconds:.1f}",
            "ran ms": f"{1e3 * self.seconds:.0f}",
        }

    def __str__(self) -> str:
        return (
            f"{self.kernel} [{self.shown}] {self.warps} sub-groups, grid {self.grid}:"
            f" {self.error}; compiled in {self.compile_seconds:.1f} s,"
            f" ran {1e3 * self.seconds:.0f} ms"
        )


class _Specialization(BaseBackend):
    """Triton's own rule for divisibility, applied to addresses."""

    @staticmethod
    def get_arg_specialization(arg: Any, ty: str, **kwargs: Any) -> str:
        if not kwargs.get("align", False):
            return ""
        if ty == "int":
            return "D" if arg % ALIGNMENT == 0 else ""
        if ty == "tensor" and isinstance(arg, torch.Tensor):
            return "D" if arg.data_ptr() % ALIGNMENT == 0 else ""
        return ""


@contextmanager
def lowering(
    cpu: Cpu,
    builtins: str | None = None,
    edit: Callable[[bytes], bytes] = lambda binary: binary,
) -> Iterator[list[Ran]]:
    """Execute launches on `cpu`; the context yields the list of those that ran.

    Args:
        builtins: as for `Cpu.kernel`.
        edit: changes each module: for planted faults.
    """
    ran: list[Ran] = []
    original = JITFunction.run
    binders: dict[int, Any] = {}
    modules: dict[str, SpirvModule] = {}
    kernels: dict[str, Any] = {}

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kw: Any) -> None:
        binder = binders.get(id(self))
        if binder is None:
            binder = binders[id(self)] = create_function_from_signature(
                self.signature, self.params, _Specialization
            )
        bound, specialization, options = binder(*args, **kw)
        launch = record._launch(self, bound, specialization, options, grid)
        key = launch.key()
        begin = time.perf_counter()
        if key not in modules:
            modules[key] = to_spirv(launch, GPU)
            module = modules[key]
            kernels[key] = cpu.kernel(edit(module.binary), module.kernel, builtins)
        compiled = time.perf_counter()
        module = modules[key]
        cpu.launch(
            kernels[key],
            [
                (kind, value)
                for (kind, _), value in zip(specialization, bound.values(), strict=True)
                if kind != "constexpr"
            ],
            grid=launch.grid,
            lanes=launch.num_warps * module.threads_per_warp,
            slm=module.slm,
        )
        done = time.perf_counter()
        ran.append(
            Ran(
                launch.name,
                launch.constexprs(),
                launch.num_warps,
                launch.grid,
                compiled - begin,
                done - compiled,
                module,
            )
        )

    JITFunction.run = run
    try:
        yield ran
    finally:
        JITFunction.run = original
