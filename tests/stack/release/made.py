# SPDX-License-Identifier: Apache-2.0
"""The files beside a wheel, of a runtime that a test makes up."""

from tiny_stack import XPU_TXT

from stack.base.releases import Release
from stack.core.markdown import rendered
from stack.release import runtime
from stack.release.runtime import Runtime

ONEAPI = """\
FROM example/os:1 AS vllm-base
ARG PYTHON_VERSION=3.12
RUN wget -O- https://example.org/signer.PUB | gpg --dearmor | tee /k > /dev/null && \\
    echo "deb [signed-by=/k] https://example.org/oneapi all main" | tee /l && \\
    printf '%s\\n' 'Package: intel-oneapi-*' 'Pin: version 2025.3*' > /p && \\
    apt-get install -y \\
    intel-oneapi-compiler-dpcpp-cpp-2025.3 \\
    intel-oneapi-mkl-devel-2025.3 && \\
    rm -rf /var/lib/apt/lists/*
ARG ONECCL_INSTALLER="intel-oneccl-9.1_offline.sh"
RUN wget "https://example.org/9.1/${ONECCL_INSTALLER}" && \\
    ln -s /opt/intel/oneapi/ccl/9.1 /opt/intel/oneapi/ccl/latest
ENV LD_LIBRARY_PATH="$LD_LIBRARY_PATH:/usr/local/lib/"
"""


def text(name: str, release: Release, here: Runtime) -> str:
    """The file of that name beside a wheel called `x`."""
    values = {"release": release, "version": "x", "name": "x.whl", "runtime": here}
    return rendered("stack.release", name, values)


def read(dockerfile: str, release: Release, publishing: str = "") -> Runtime:
    return runtime.runtime(XPU_TXT, dockerfile, publishing, release)
