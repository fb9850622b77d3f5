# SPDX-License-Identifier: Apache-2.0
"""A stack whose v1.0 patches, brings an overlay file and a kernel, and is shipped."""

import textwrap
from pathlib import Path

from tiny_stack import BASE, HEADER, TWO, VALUE, TinyStack

from stack.release.ship import ReleaseArtifacts, ship
from stack.series.overlay import TRITON_IN_VLLM
from stack.series.tree import KERNEL_HOME

LAYER = "vllm/xpu/layer.py"
DECODE = HEADER + "from ._launch import OPTIONS\nfrom ._triton import triton\n"
LAUNCH = HEADER + "OPTIONS = 1\n"
WHERE = """\
#include <Python.h>
static PyModuleDef here = {PyModuleDef_HEAD_INIT, "where", __FILE__, 0, nullptr};
PyMODINIT_FUNC PyInit_where(void) { return PyModule_Create(&here); }
"""


class ShippedStack(TinyStack):
    """v1.0 with the steps `raise-value` and `bring-kernel`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.write("tests/steps/test_any.py", "def test_any(): pass\n")
        kernels = {
            "__init__": '"""Kernels."""\n',
            "_triton": "import triton\n",
            "_launch": LAUNCH,
            "decode": DECODE,
        }
        for name, text in kernels.items():
            self.write(f"kernels/xpu_dsv4/{name}.py", text)
        for release in ("v1.0", "v2.0"):
            self.add("raise-value", {VALUE: TWO}, release)
        kernels["_triton"] = TRITON_IN_VLLM.decode()
        files = {f"{KERNEL_HOME}/{name}.py": text for name, text in kernels.items()}
        files[LAYER] = HEADER + "LAYER = 1\n"
        self.step("bring-kernel", files, "Kernels: decode\n")

    def with_extension(self) -> None:
        """Add a step that compiles an extension which notes where it was built."""
        extension = textwrap.dedent(
            """\
            from setuptools import Extension

            where = Extension(
                "vllm.where",
                ["csrc/where.cpp"],
                extra_compile_args=["-g"],
                define_macros=[("Py_LIMITED_API", "0x030b0000")],
                py_limited_api=True,
            )
            """
        )
        script = BASE["setup.py"].replace(
            "packages=packages)", "packages=packages, ext_modules=[where])"
        )
        assert "where" in script
        edits = {"setup.py": extension + script, "csrc/where.cpp": WHERE}
        self.step("extension", edits)

    def ship(self, to: Path, release: str = "v1.0") -> ReleaseArtifacts:
        """`xpustack build v1.0 --to TO --offline`."""
        chosen = self.releases[release]
        return ship(self.project, self.cache, chosen, to)
