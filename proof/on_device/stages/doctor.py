# SPDX-License-Identifier: Apache-2.0
"""The doctor: what the probe found beside the pins, what is wrong, how to fix it."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from proof.on_device.stages.records import Fact, Finding, Kind
from proof.on_device.stages.setup import Outcome, Setup
from stack.core.project import Project

PROBE_SECONDS = 300.0
GIB = 1 << 30
LEAST_MEMORY = 6 * GIB
"""Below it, comparing and tuning run out of memory."""
ENGINES = 8
"""Vector engines of an Xe-core."""
LACKS = {
    True: "Its op of the indexer's scores, fp8_mqa_logits, is for Xe2 alone",
    False: "Its experts are for Xe2 and Xe3 alone",
}
"""What a device lacks that is no Xe2, by whether it is an Xe3."""


def known_devices(project: Project) -> list[str]:
    """The devices for which the cost model has constants."""
    data = tomllib.loads((project.root / "lab/aot/devices.toml").read_text("utf-8"))
    return list(data["device"])


def known_as(name: str, known: list[str]) -> str:
    """The cost model's name of a device; empty where it has none."""
    plain = _plain(name)
    found = [model for model in known if _plain(model.partition(",")[0]) in plain]
    return max(found, key=len, default="")


def _plain(name: str) -> str:
    words = re.sub(r"\((r|tm)\)", " ", name.lower())
    return " ".join(re.findall(r"[a-z0-9]+", words))


def diagnose(setup: Setup) -> Outcome:
    """Run the doctor: facts beside the pins, and what is wrong."""
    target = setup.folder("doctor") / "probe.json"
    target.unlink(missing_ok=True)
    limit = min(PROBE_SECONDS, 60 * setup.minutes)
    ended = setup.execute(
        "doctor", "proof.on_device.probe", setup.kind, target, limit=limit
    )
    try:
        setup.probe = json.loads(target.read_text())
    except (OSError, ValueError):
        setup.probe = {}
    if ended.timed_out:
        return ended.failed("torch and a first kernel")
    if ended.returncode or not setup.probe:
        return ended.failed("the probe")
    known = known_devices(setup.project)
    found = tuple(findings(setup, known))
    name = str(setup.device.get("name", ""))
    data = {
        "facts": msgspec.to_builtins(facts(setup)),
        "probe": setup.probe,
        "known_as": known_as(name, known) if name else "",
    }
    if any(finding.fatal for finding in found):
        return Outcome("failed", found[0].what, found, data)
    return Outcome("passed", f"{name}, {len(found)} findings", found, data)


def facts(setup: Setup) -> tuple[Fact, ...]:
    """The probe's answers by name, in the order in which people ask for them."""
    probe, kind, release = setup.probe, setup.kind, setup.release
    device = setup.device
    properties = device.get("properties", {})
    installed, packages = probe["distributions"], probe["packages"]
    cards = probe["cards"] if kind == "xpu" else []
    units = properties.get("max_compute_units", 0)
    cores = (
        units // ENGINES
        if kind == "xpu"
        else properties.get("multi_processor_count", 0)
    )
    memory = device.get("memory", 0)
    pinned = {
        "torch": release.torch.version,
        "triton": release.triton.version,
        "vllm-xpu-kernels": release.xpu_kernels.version,
        "vllm": release.version,
    }
    found = {
        "device": device.get("name", ""),
        "devices": str(device.get("count", "")),
        "PCI id": ", ".join(sorted({card["pci"] for card in cards})),
        "Xe-cores" if kind == "xpu" else "multiprocessors": str(cores or ""),
        "memory": f"{memory / GIB:.1f} GiB" if memory else "",
        "free memory": f"{device['free'] / GIB:.1f} GiB" if memory else "",
        "driver": str(properties.get("driver_version", ""))
        if kind == "xpu"
        else probe["nvidia"],
        "compute-runtime": packages.get("compute-runtime", ""),
        "IGC": packages.get("IGC", ""),
        "kernel module": ", ".join(sorted(set(probe["modules"])))
        if kind == "xpu"
        else "",
        "oneCCL": installed.get("oneCCL", ""),
        "graphs": "yes" if device.get("graphs") else "no",
        "vllm-xpu-kernels says": ", ".join(
            name for name, true in device.get("architecture", {}).items() if true
        ),
        "launch": probe["launch"],
        "Python": probe["python"],
        **{
            name: installed.get(name, "")
            for name in ("torch", "triton", "vllm-xpu-kernels", "vllm", "pytest")
        },
    }
    intel = (
        *("PCI id", "compute-runtime", "IGC", "kernel module", "oneCCL"),
        "vllm-xpu-kernels says",
    )
    return tuple(
        Fact(name, value, pinned.get(name, "") if kind == "xpu" else "")
        for name, value in found.items()
        if kind == "xpu" or name not in intel
    )


def findings(setup: Setup, known: list[str]) -> Iterator[Finding]:
    """What is wrong, the worst first."""
    probe, kind, release = setup.probe, setup.kind, setup.release
    if probe["problem"]:
        yield _no_device(probe, kind)
        return
    device = probe["device"]
    if probe["launch"] != "right":
        yield Finding(
            f"a Triton kernel does not run: {probe['launch']}",
            ""
            if probe["compiler"]
            else "install a C++ compiler, such as g++: Triton compiles its launcher",
            fatal=True,
        )
    if device["memory"] < LEAST_MEMORY:
        yield Finding(
            f"{device['memory'] / GIB:.1f} GiB of memory; compare and tune need"
            f" {LEAST_MEMORY // GIB} GiB and are left out",
            "run them on a device with more memory",
        )
    elif device["free"] < LEAST_MEMORY:
        yield Finding(
            f"only {device['free'] / GIB:.1f} of {device['memory'] / GIB:.1f} GiB are"
            f" free; compare and tune need {LEAST_MEMORY // GIB} GiB and are left out",
            "stop other programs on the device, then run again",
        )
    if not probe["distributions"].get("pytest"):
        yield Finding("pytest is not installed; prove needs it", "pip install pytest")
    if kind != "xpu":
        return
    if not known_as(device["name"], known):
        yield Finding(
            f"{device['name']} is not in lab/aot/devices.toml: all stages run, but the"
            " cost model has no data of it",
            "send the report, or ingest it: xpustack ingest FILE",
        )
    for name, pin in (
        ("torch", release.torch.version),
        ("triton", release.triton.version),
        ("vllm-xpu-kernels", release.xpu_kernels.version),
    ):
        installed = probe["distributions"].get(name, "")
        if installed.partition("+")[0] != pin.partition("+")[0]:
            yield Finding(
                f"{name} {installed or 'is not installed'}; {release.name} pins {pin}",
                "install what constraints.txt beside the wheel says (docs/deploying.md)"
                ", or name the release that is installed: --release vX.Y.Z",
            )
    if not device["graphs"]:
        yield Finding("torch has no torch.xpu.XPUGraph: no figures in graphs")
    yield from _of_architecture(device.get("architecture", {}), device, release.name)


def _of_architecture(
    said: Mapping[str, bool], device: Mapping[str, Any], release: str
) -> Iterator[Finding]:
    """What the kind of the device keeps the release from doing (docs/deploying.md)."""
    if not said.get("is_xe2_arch", True):
        yield Finding(
            f"{device['name']} is no Xe2 to vllm-xpu-kernels: {release} answers no"
            f" prompt of DeepSeek-V4 on it. {LACKS[said.get('is_xe3_arch', False)]}",
            "serve on a Max 1100 or 1550, Battlemage or Lunar Lake",
        )
    if said.get("is_pvc"):
        yield Finding(
            "captured graphs of MXFP4 experts gave wrong text on two Max 1100, eager"
            " mode did not (vllm#48946, v0.24.0)",
            "leave VLLM_XPU_GRAPH_CHECK on, and compare a few prompts with"
            " --enforce-eager",
        )


def _no_device(probe: Mapping[str, Any], kind: Kind) -> Finding:
    if kind == "cuda":
        return Finding(probe["problem"], "nvidia-smi", fatal=True)
    cards = probe["cards"]
    if not probe["distributions"].get("torch"):
        fix = "name a Python that has torch for XPU: --python PATH"
    elif "has no torch" in probe["problem"] or probe["distributions"]["torch"].endswith(
        ("+cpu", "cuda")
    ):
        fix = "install torch for XPU (docs/deploying.md), or name its Python: --python"
    elif not cards:
        fix = "the kernel shows no Intel GPU: lspci -nn | grep -i -e vga -e display"
    elif not probe["packages"].get("compute-runtime"):
        fix = "install Intel's compute runtime (libze-intel-gpu1), then run again"
    else:
        fix = "is the user in the group render? ls -l /dev/dri; id"
    seen = ", ".join(f"{c['pci']} with {c['module']}" for c in cards) or "none"
    return Finding(f"{probe['problem']}; Intel cards: {seen}", fix, fatal=True)
