# SPDX-License-Identifier: Apache-2.0
"""Where kernels run in a test: what `--device` names, and nothing else.

There is no default. A run that was meant for a GPU must not be green on a CPU.
"""

import os
from typing import Any

import pytest
import torch

RAN = pytest.StashKey[list[Any]]()
"""Launches that `--device lowered` executed."""
KINDS = ("xpu", "cuda", "interpreter", "lowered")


def take_device(config: pytest.Config) -> torch.device:
    """The device that `--device` names, before Triton is imported.

    Raises:
        pytest.UsageError: none is named, or torch sees none of that kind.
    """
    kind = config.getoption("--device")
    if kind is None:
        raise pytest.UsageError(f"say where kernels run: --device {'|'.join(KINDS)}")
    if kind == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
        from standins.interpreter import repair
        from standins.interpreter_speed import speed_up

        repair()
        speed_up()
        return torch.device("cpu")
    if kind == "lowered":
        return _lowered(config)
    if not (hasattr(torch, kind) and getattr(torch, kind).is_available()):
        raise pytest.UsageError(
            f"torch {torch.__version__} sees no {kind} device;"
            f" next: xpustack device --device {kind} doctor"
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise pytest.UsageError(
            "TRITON_INTERPRET=1 keeps kernels off the GPU; unset it"
        )
    return torch.device(kind)


def _lowered(config: pytest.Config) -> torch.device:
    """The CPU, on which Intel's own lowering of every launch is executed.

    Raises:
        pytest.UsageError: its compilers are not here.
    """
    from contextlib import ExitStack

    try:
        from lab.lowered.opencl import Cpu
        from lab.lowered.run import lowering
        from stack.core.cache import Cache
    except ImportError as error:
        raise pytest.UsageError(f"{error}; next: tox -e lowered") from error
    cpu = Cpu(Cache.default().root / "lowered")
    stack = ExitStack()
    config.stash[RAN] = stack.enter_context(lowering(cpu))
    config.add_cleanup(stack.close)
    return torch.device("cpu")


def described(config: pytest.Config) -> str:
    kind = config.getoption("--device")
    if kind is None:
        return ""
    if kind == "lowered":
        return "device: none, Intel's lowering runs on the CPU (--device lowered)"
    if kind == "interpreter":
        return "device: none, kernels are interpreted on the CPU (--device interpreter)"
    module = getattr(torch, kind)
    name = module.get_device_name() if module.is_available() else "none"
    return f"device: {name} (--device {kind}), torch {torch.__version__}"
