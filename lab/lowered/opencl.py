# SPDX-License-Identifier: Apache-2.0
"""Intel's OpenCL runtime for CPUs: compile SPIR-V, keep the binary, launch it."""

import ctypes
import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl

from .spirv import imports, without_kernel_attributes

BUILTINS = Path(__file__).with_name("builtins.cl")
PLATFORM = "Intel(R) OpenCL"
SCALARS = {
    "i1": np.int8,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "u32": np.uint32,
    "u64": np.uint64,
    "fp32": np.float32,
    "fp64": np.float64,
}
"""Types of arguments that are no pointers, by Triton's names."""


class Missing(Exception):
    """There is no Intel OpenCL runtime for CPUs here."""


class Cpu:
    """The CPU as an OpenCL device.

    Args:
        folder: where compiled programs are kept, by content.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.compiled = 0
        """How many programs were compiled instead of read from `folder`."""

    @cached_property
    def context(self) -> Any:
        """A context on the device.

        Raises:
            Missing: no such platform.
        """
        _register()
        try:
            platforms = cl.get_platforms()
        except cl.LogicError as error:
            raise Missing(f"no OpenCL platform: {error}") from None
        for platform in platforms:
            if platform.name == PLATFORM:
                return cl.Context(platform.get_devices(cl.device_type.CPU))
        raise Missing(f"no platform {PLATFORM}")

    @cached_property
    def queue(self) -> Any:
        return cl.CommandQueue(self.context)

    def kernel(self, spirv: bytes, name: str, builtins: str | None = None) -> Any:
        """The kernel `name` of a module, with what the module imports.

        Args:
            builtins: OpenCL C of the imported functions; None for our own.
        """
        source = BUILTINS.read_text() if builtins is None else builtins
        binary = without_kernel_attributes(spirv)
        device = self.context.devices[0]
        key = hashlib.sha256()
        for part in (binary, source.encode(), device.version.encode()):
            key.update(hashlib.sha256(part).digest())
        key.update(f"{device.driver_version} {device.name}".encode())
        path = self.folder / f"{key.hexdigest()}.bin"
        if path.is_file():
            program = cl.Program(self.context, [device], [path.read_bytes()]).build()
            return cl.Kernel(program, name)
        module = cl._cl._create_program_with_il(self.context, binary)
        module.compile(b"")
        parts = [module]
        if any("intel_sub_group" in wanted for wanted in imports(binary)):
            helpers = cl._cl._Program(self.context, source)
            helpers.compile(b"-cl-std=CL3.0")
            parts.append(helpers)
        linked = cl._cl._Program.link(self.context, parts, b"", [device])
        self.folder.mkdir(parents=True, exist_ok=True)
        (content,) = linked.get_info(cl.program_info.BINARIES)
        temporary = path.with_suffix(".part")
        temporary.write_bytes(content)
        temporary.replace(path)
        self.compiled += 1
        return cl.Kernel(linked, name)

    def launch(
        self,
        kernel: Any,
        arguments: Sequence[tuple[str, Any]],
        *,
        grid: tuple[int, ...],
        lanes: int,
        slm: int,
    ) -> None:
        """Run a kernel to its end.

        Args:
            arguments: Triton's type and the value of each; a tensor for a pointer.
            grid: work-groups along each axis.
            lanes: work-items of a work-group.
            slm: bytes of shared local memory of a work-group.
        """
        for place, (kind, value) in enumerate(arguments):
            if kind.startswith("*"):
                kernel.set_arg(place, cl.SVM(_memory(value)))
            else:
                kernel.set_arg(place, SCALARS[kind](value))
        for place in range(len(arguments), kernel.num_args):
            kernel.set_arg(place, cl.LocalMemory(max(slm, 16)))
        sizes = tuple(grid) + (1,) * (3 - len(grid))
        total = (sizes[0] * lanes, sizes[1], sizes[2])
        cl.enqueue_nd_range_kernel(self.queue, kernel, total, (lanes, 1, 1)).wait()


def _register() -> None:
    """Tell the OpenCL loader where the runtime's library lies; its wheel names a path
    of the machine that built it. Without effect once a platform was asked for.

    Raises:
        Missing: the runtime is not installed.
    """
    try:
        files = importlib.metadata.distribution("intel-opencl-rt").files or []
    except importlib.metadata.PackageNotFoundError as error:
        raise Missing("intel-opencl-rt is not installed") from error
    library = next(file for file in files if file.name == "libintelocl.so")
    folder = Path(tempfile.mkdtemp(prefix="opencl-"))
    (folder / "intel.icd").write_text(f"{Path(str(library.locate())).resolve()}\n")
    os.environ["OCL_ICD_VENDORS"] = str(folder)


def _memory(tensor: Any) -> Any:
    """The memory from a tensor's first element to its storage's end."""
    storage = tensor.untyped_storage()
    size = storage.nbytes() - (tensor.data_ptr() - storage.data_ptr())
    return np.ctypeslib.as_array(
        (ctypes.c_uint8 * max(size, 1)).from_address(tensor.data_ptr())
    )
