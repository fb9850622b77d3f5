# SPDX-License-Identifier: Apache-2.0
"""What a build must not take from the machine: CUDA, folders of the interpreter."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from stack.builds import build, torch_config

CMAKE_LISTS = """\
cmake_minimum_required(VERSION 3.26)
project(extension CXX)
list(APPEND CMAKE_PREFIX_PATH "${CMAKE_SOURCE_DIR}/cuda")
find_package(Torch REQUIRED)
add_library(extension MODULE extension.cpp)
target_link_libraries(extension PRIVATE torch ${TORCH_LIBRARIES})
"""
CUDA_CONFIG = 'message(FATAL_ERROR "Your installed Caffe2 version uses CUDA")\n'


def test_an_extension_needs_no_cuda_whatever_build_of_torch_is_installed(
    tmp_path: Path,
) -> None:
    """As in vLLM: the installed torch's own configuration is on the path."""
    (tmp_path / "CMakeLists.txt").write_text(CMAKE_LISTS)
    (tmp_path / "extension.cpp").write_text(
        "#include <c10/macros/Macros.h>\nC10_EXPORT int answer() { return 42; }\n"
    )
    theirs = tmp_path / "cuda/share/cmake/Torch"
    theirs.mkdir(parents=True)
    (theirs / "TorchConfig.cmake").write_text(CUDA_CONFIG)
    programs = f"{Path(sys.executable).parent}:/usr/bin:/bin"

    def cmake(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "cmake", *arguments],
            cwd=tmp_path,
            env={"PATH": programs, **torch_config.variables(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return f"{done.returncode} {done.stdout}"

    assert "uses CUDA" in cmake("-G", "Ninja", "-B", "without", ".")
    torch_config.write(tmp_path)
    configured = cmake("-G", "Ninja", "-B", "with", ".")
    assert configured.startswith("0 "), configured
    built = cmake("--build", "with")
    assert built.startswith("0 "), built
    extension = (tmp_path / "with/libextension.so").read_bytes()
    assert b"libtorch_cpu.so" in extension
    assert b"cuda" not in extension
    # CMake blanks a path to torch when it installs, but its length and the build id,
    # a hash of what was linked, would stay.
    assert sys.prefix.encode() not in extension


def test_extensions_are_linked_without_the_folders_of_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since Python 3.12, C++ is linked with the interpreter's own link command too."""
    libraries = "/home/someone/python/lib"
    monkeypatch.setattr(sys, "base_prefix", "/home/someone/python")
    monkeypatch.setattr(
        sysconfig,
        "get_config_var",
        lambda name: f"g++ -shared -L{libraries} -Wl,-rpath,{libraries} -Wl,-z,now",
    )
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CXX", "clang++ -m64")
    variables = build.build_variables(tmp_path, "1.0")
    assert variables["LDSHARED"] == "g++ -shared -Wl,-z,now"
    assert variables["LDCXXSHARED"] == "clang++ -m64 -shared -Wl,-z,now"
