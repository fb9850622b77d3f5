# SPDX-License-Identifier: Apache-2.0
"""Where a benchmark runs: the device that `--device` names, and no other."""

import argparse
import os

import torch

KINDS = ("xpu", "cuda", "interpreter")


class UnusableDevice(Exception):
    """The named device is not there, or Triton would not use it."""


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device`, which has no default."""
    parser.add_argument(
        "--device",
        choices=KINDS,
        required=True,
        help="a GPU of that kind; `interpreter`: tiny shapes on the CPU, a dry run",
    )


def take_device(kind: str) -> torch.device:
    """The device of a kind; for `interpreter` the CPU, with the interpreter repaired.
    On CUDA the kernels take its own forms.

    Raises:
        UnusableDevice: torch sees none, or `TRITON_INTERPRET` says otherwise.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if kind == "interpreter":
        if not interpreted:
            raise UnusableDevice("set TRITON_INTERPRET=1 for --device interpreter")
        from standins import interpreter

        interpreter.repair()
        return torch.device("cpu")
    if interpreted:
        raise UnusableDevice(f"unset TRITON_INTERPRET for --device {kind}")
    if not (hasattr(torch, kind) and getattr(torch, kind).is_available()):
        raise UnusableDevice(
            f"torch {torch.__version__} sees no {kind} device;"
            f" next: xpustack device --device {kind} doctor"
        )
    return torch.device(kind)


def describe(device: torch.device) -> str:
    """Name of the device, as its driver gives it."""
    if device.type == "cpu":
        return "CPU, interpreted"
    return str(getattr(torch, device.type).get_device_name())
