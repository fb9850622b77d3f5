# SPDX-License-Identifier: Apache-2.0
"""`probe KIND FILE`: what a machine has of a device's driver and libraries."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

DISTRIBUTIONS = {
    "torch": ("torch",),
    "triton": ("triton-xpu", "pytorch-triton-xpu", "triton"),
    "vllm-xpu-kernels": ("vllm-xpu-kernels",),
    "vllm": ("vllm",),
    "oneCCL": ("oneccl", "oneccl-devel"),
    "pytest": ("pytest",),
    "pytest-xdist": ("pytest-xdist",),
    "numpy": ("numpy",),
}
"""Distributions by the fact's name; the first that is installed counts."""
PACKAGES = {
    "compute-runtime": (
        "libze-intel-gpu1",
        "intel-level-zero-gpu",
        "intel-opencl-icd",
        "intel-compute-runtime",
    ),
    "IGC": ("libigc2", "intel-igc-core-2", "libigc1", "intel-igc-core", "intel-igc"),
}
"""Packages of the system, likewise."""
INTEL = "0x8086"
QUERIES = (
    *("is_xe2_arch", "is_xe3_arch", "is_pvc"),
    *("is_bmg", "is_bmg_g21", "is_bmg_g31"),
)
"""Ops of vllm-xpu-kernels that ask for the kind of a device."""


def distributions() -> dict[str, str]:
    found = {}
    for fact, names in DISTRIBUTIONS.items():
        for name in names:
            try:
                found[fact] = metadata.version(name)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def packages() -> dict[str, str]:
    """Versions that dpkg or rpm knows; loaded libraries' names where neither does."""
    found = {}
    for fact, names in PACKAGES.items():
        for name in names:
            version = _package(name)
            if version:
                found[fact] = f"{version} ({name})"
                break
    return found


def _package(name: str) -> str:
    for command in (
        ["dpkg-query", "-W", "-f=${Version}", name],
        ["rpm", "-q", "--qf=%{VERSION}-%{RELEASE}", name],
    ):
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        if done.returncode == 0 and done.stdout:
            return done.stdout.strip()
    return ""


def cards(root: Path = Path("/sys/class/drm")) -> list[dict[str, str]]:
    """Intel's graphics cards: PCI id and kernel module."""
    found: dict[str, dict[str, str]] = {}
    for device in sorted(root.glob("card[0-9]*/device")):
        try:
            if (device / "vendor").read_text().strip() != INTEL:
                continue
            pci = (device / "device").read_text().strip().removeprefix("0x")
            module = (device / "driver").resolve().name
        except OSError:
            continue
        found[str(device.resolve())] = {"pci": f"8086:{pci}", "module": module}
    return list(found.values())


def module_version(name: str) -> str:
    """The kernel's module, with its own version or the kernel's."""
    own = Path("/sys/module") / name / "version"
    version = own.read_text().strip() if own.is_file() else os.uname().release
    return f"{name} {version}"


def nvidia() -> str:
    """Version of NVIDIA's driver."""
    version = Path("/proc/driver/nvidia/version")
    match = version.is_file() and re.search(r"\s(\d+\.[\d.]+)\s", version.read_text())
    return match[1] if match else ""


def device_facts(kind: str) -> dict[str, Any]:
    """What torch says of the first device.

    Raises:
        RuntimeError: torch has no support for the kind, or sees no device.
    """
    import torch

    module = getattr(torch, kind, None)
    if module is None:
        raise RuntimeError(f"torch {torch.__version__} has no torch.{kind}")
    if not module.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no {kind} device")
    properties = module.get_device_properties(0)
    names = [n for n in dir(properties) if not n.startswith("_")]
    simple = {
        name: value
        for name in names
        if isinstance(value := getattr(properties, name), str | int | float)
    }
    free, total = module.mem_get_info()
    return {
        "name": module.get_device_name(0),
        "count": module.device_count(),
        "properties": simple,
        "memory": total,
        "free": free,
        "graphs": hasattr(module, "XPUGraph" if kind == "xpu" else "CUDAGraph"),
        "architecture": architecture() if kind == "xpu" else {},
        "cuda": torch.version.cuda or "",
    }


def architecture() -> dict[str, bool]:
    """What vllm-xpu-kernels says of the first device, by the name of its op; empty
    where it is not installed."""
    import torch

    try:
        importlib.import_module("vllm_xpu_kernels._xpu_C")
    except (ImportError, OSError):
        return {}
    ops = torch.ops._xpu_C
    return {name: getattr(ops, name)(0) for name in QUERIES if hasattr(ops, name)}


def main(kind: str, target: Path) -> None:
    facts: dict[str, Any] = {
        "distributions": distributions(),
        "packages": packages(),
        "cards": cards(),
        "nvidia": nvidia(),
        "python": sys.version.split()[0],
        "compiler": shutil.which(os.environ.get("CC", "cc")) is not None
        or shutil.which("gcc") is not None,
        "modules": [module_version(card["module"]) for card in cards()],
        "device": None,
        "problem": "",
        "launch": "",
    }
    target.write_text(json.dumps(facts))
    print("asking torch for the device", flush=True)
    try:
        facts["device"] = device_facts(kind)
    except (ImportError, OSError, RuntimeError) as error:
        facts["problem"] = f"{type(error).__name__}: {error}"
    target.write_text(json.dumps(facts))
    if facts["device"]:
        print("compiling and launching a kernel", flush=True)
        try:
            import torch

            from proof.on_device.trial import launch

            facts["launch"] = "right" if launch(torch.device(kind)) else "wrong numbers"
        except Exception as error:
            facts["launch"] = f"{type(error).__name__}: {str(error)[:500]}"
    target.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
