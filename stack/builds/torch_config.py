# SPDX-License-Identifier: Apache-2.0
"""A CMake configuration for torch that works with every build of torch.

torch's own configuration requires CUDA's compiler if torch is the CUDA build, which
the default package index has. An XPU build of vLLM compiles nothing for CUDA, so this
configuration names only the libraries that every build of torch contains.
"""

import importlib.util
from pathlib import Path

from stack.core.errors import EnvironmentProblem, in_tox

_FOLDER = "torch-config"
_TEXT = """\
# Link with the run path of the installed file: that to torch here is private.
set(CMAKE_BUILD_WITH_INSTALL_RPATH TRUE)
set(TORCH_INCLUDE_DIRS "@torch@/include" "@torch@/include/torch/csrc/api/include")
foreach(name c10 torch_cpu torch)
  add_library(${name} SHARED IMPORTED)
  set_target_properties(${name} PROPERTIES
    IMPORTED_LOCATION "@torch@/lib/lib${name}.so"
    IMPORTED_SONAME "lib${name}.so"
    INTERFACE_INCLUDE_DIRECTORIES "${TORCH_INCLUDE_DIRS}")
endforeach()
# Linkers drop libraries whose operators are only registered, unless told not to.
target_link_libraries(torch INTERFACE
  c10 "-Wl,--no-as-needed,\\"@torch@/lib/libtorch_cpu.so\\" -Wl,--as-needed")
set(TORCH_LIBRARIES
  torch "-Wl,--no-as-needed,\\"@torch@/lib/libtorch.so\\" -Wl,--as-needed")
set(TORCH_FOUND TRUE)
"""


def variables(work: Path) -> dict[str, str]:
    """The environment variables by which CMake finds the file that `write` writes."""
    return {"Torch_ROOT": str(work / _FOLDER)}


def write(work: Path) -> None:
    """Write the configuration for the installed torch into `work`.

    Raises:
        EnvironmentProblem: torch is not installed.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise EnvironmentProblem(
            "torch is not installed, and vLLM cannot be built without it",
            again=in_tox,
        )
    (work / _FOLDER).mkdir()
    text = _TEXT.replace("@torch@", Path(torch.origin).parent.as_posix())
    (work / _FOLDER / "TorchConfig.cmake").write_text(text, "utf-8")
