# SPDX-License-Identifier: Apache-2.0
"""Where kernels run in a test: what `--device` names, and nothing else.

There is no default. A run that was meant for a GPU must not be green on a CPU.
"""

import os

import pytest
import torch

KINDS = ("xpu", "cuda", "interpreter")


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
        from kernels.interpreter import repair
        from kernels.interpreter_speed import speed_up

        repair()
        speed_up()
        return torch.device("cpu")
    if not (hasattr(torch, kind) and getattr(torch, kind).is_available()):
        raise pytest.UsageError(
            f"torch {torch.__version__} sees no {kind} device;"
            f" next: python -m xpustack device --device {kind} doctor"
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise pytest.UsageError(
            "TRITON_INTERPRET=1 keeps kernels off the GPU; unset it"
        )
    return torch.device(kind)


def described(config: pytest.Config) -> str:
    kind = config.getoption("--device")
    if kind is None:
        return ""
    if kind == "interpreter":
        return "device: none, kernels are interpreted on the CPU (--device interpreter)"
    module = getattr(torch, kind)
    name = module.get_device_name() if module.is_available() else "none"
    return f"device: {name} (--device {kind}), torch {torch.__version__}"
