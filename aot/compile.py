# SPDX-License-Identifier: Apache-2.0
"""From a recorded launch to Intel machine code: Triton → SPIR-V → ocloc → counts.

The front end is triton-xpu without its driver: the backend class is used with device
properties that ocloc itself reports, so no device and no SYCL runtime are needed. Each
launch compiles in a forked child, because the compiler aborts the process on some
errors.
"""

import functools
import hashlib
import importlib.metadata
import json
import multiprocessing
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from triton._C.libtriton import intel, ir
from triton.backends.compiler import GPUTarget
from triton.backends.intel.compiler import XPUBackend
from triton.compiler import ASTSource

from . import machine
from .ocloc import Ocloc, OclocError
from .record import Launch

EXPONENTIALS = ("math.exp", "math.exp2")
DEVICES = ("pvc", "bmg", "lnl", "ptl")
FLAGS = {
    "128": "-cl-intel-128-GRF-per-thread",
    "256": "-cl-intel-256-GRF-per-thread",
    "auto": "-cl-intel-enable-auto-large-GRF-mode",
    "": "",
}
FORMAT = 6
"""Version of the stored results; raise it when their content changes."""

Result = dict[str, Any]
Properties = dict[str, Any]


class Store(Protocol):
    """Where results are kept between runs."""

    def results_get(self, key: str) -> Result | None: ...
    def results_put(self, key: str, value: Result) -> None: ...


def front_end() -> str:
    """Name and version of the Triton that is installed here."""
    return f"triton-xpu {importlib.metadata.version('triton-xpu')}"


class _Backend(XPUBackend):
    """triton-xpu's backend without its architecture parser, which wants SYCL."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        self.device_arch = ""
        self.properties = self.parse_target(target.arch)
        self.binary_ext = "spv"


@functools.lru_cache
def _extensions(ocloc: Ocloc, device: str) -> frozenset[str]:
    with tempfile.TemporaryDirectory() as name:
        text = ocloc.run(
            "query", "CL_DEVICE_EXTENSIONS", "-device", device, cwd=Path(name)
        )
        for file in Path(name).glob("*"):
            text += file.read_text(errors="replace")
    return frozenset(re.findall(r"cl_\w+", text))


def properties(ocloc: Ocloc, device: str) -> Properties:
    """Device properties in the form that triton-xpu's `parse_target` reads."""
    have = _extensions(ocloc, device)
    matrix = "cl_intel_subgroup_matrix_multiply_accumulate"
    return {
        "max_work_group_size": 1024,
        "max_num_sub_groups": 64,
        "sub_group_sizes": [16, 32],
        "has_fp64": "cl_khr_fp64" in have,
        "has_subgroup_matrix_multiply_accumulate": matrix in have,
        "has_subgroup_matrix_multiply_accumulate_tensor_float32": f"{matrix}_tf32"
        in have
        or f"{matrix}_tensor_float32" in have,
        "has_subgroup_2d_block_io": "cl_intel_subgroup_2d_block_io" in have,
        "has_bfloat16_conversions": "cl_intel_bfloat16_conversions" in have,
    }


def to_spirv(launch: Launch, arch: Properties) -> tuple[bytes, str, str, Result]:
    """Compile the front half.

    Returns:
        (SPIR-V, kernel name, TTGIR text, metadata: sub-group size and the like).
    """
    backend = _Backend(GPUTarget("xpu", arch, 32))
    grf = {"128": "small", "256": "large", "auto": "auto"}.get(launch.grf, "default")
    options = backend.parse_options(
        {
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            "grf_mode": grf,
        }
    )
    source = ASTSource(
        launch.function, launch.signature, launch.constants, launch.attributes
    )
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        options,
        backend.get_codegen_implementation(options),
        backend.get_module_map(),
        context,
    )
    metadata: Result = {"num_warps": launch.num_warps}
    module = backend.make_ttir(module, metadata, options)
    module = backend.make_ttgir(module, metadata, options, backend.properties)
    ttgir = str(module)
    metadata["threads_per_warp"] = intel.get_threads_per_warp(module)
    llvm_ir = backend.make_llir(module, metadata, options)
    spirv = backend.make_spv(llvm_ir, metadata, options)
    return spirv, metadata["name"], ttgir, metadata


def dots(ttgir: str) -> list[Result]:
    """The matrix products of a kernel and how their result is laid over sub-groups.

    Returns:
        For each `tt.dot`: `shape` of its result, `warps` along each axis of it (None
        where the product is not on the matrix unit), and `of_probabilities`, true if
        its left operand comes from an exponential: a PV product.
    """
    layouts = {
        name: [int(n) for n in warps.split(",")]
        for name, warps in re.findall(
            r"^(#\w+) = #triton_intel_gpu\.dpas<\{.*?warpsPerCTA = \[([\d, ]+)\]",
            ttgir,
            re.M,
        )
    }
    found: list[Result] = []
    scopes: list[dict[str, bool]] = [{}]
    for line in ttgir.splitlines():
        text = line.strip()
        if text.startswith("}") and len(scopes) > 1:
            scopes.pop()
        match = re.match(r"(%[\w-]+)(?::\d+)? = (?:\"?)([\w.]+)(.*)", text)
        if match:
            name, operation, rest = match.groups()
            operands = [
                _look_up(scopes, operand) for operand in re.findall(r"%[\w-]+", rest)
            ]
            scopes[-1][name] = operation in EXPONENTIALS or any(operands)
            result = re.search(r"-> tensor<([\dx]+)x\w+, (#\w+)>", rest)
            if operation == "tt.dot" and result:
                found.append(
                    {
                        "shape": [int(n) for n in result[1].split("x")],
                        "warps": layouts.get(result[2]),
                        "of_probabilities": operands[0],
                    }
                )
        if text.endswith("{"):
            scopes.append({})
    return found


def _look_up(scopes: list[dict[str, bool]], name: str) -> bool:
    """Names are unique in a region and those around it, not in a whole function."""
    for scope in reversed(scopes):
        if name in scope:
            return scope[name]
    return False


def compile_launch(launch: Launch, devices: Sequence[str], ocloc: Ocloc) -> Result:
    """Compile one launch for `devices`.

    Returns:
        {"dots": …, "threads_per_warp": …, "devices": {device: resources}}.
    """
    by_arch: dict[str, tuple[bytes, str, str, Result]] = {}
    result: Result = {"devices": {}}
    for device in devices:
        arch = properties(ocloc, device)
        label = json.dumps(arch, sort_keys=True)
        if label not in by_arch:
            by_arch[label] = to_spirv(launch, arch)
        spirv, name, ttgir, metadata = by_arch[label]
        result["dots"] = dots(ttgir)
        result["threads_per_warp"] = metadata["threads_per_warp"]
        code = _native(spirv, name, device, launch.grf, ocloc)
        result["devices"][device] = {**code, "slm": metadata["shared"]}
    return result


def _native(spirv: bytes, name: str, device: str, grf: str, ocloc: Ocloc) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "kernel.spv").write_bytes(spirv)
        arguments = ["-file", "kernel.spv", "-spirv_input", "-device", device]
        arguments += ["-output", "kernel", "-output_no_suffix", "-out_dir", "out"]
        if FLAGS[grf]:
            arguments += ["-options", FLAGS[grf]]
        ocloc.run("compile", "-q", *arguments, cwd=work)
        binaries = [p for p in (work / "out").iterdir() if p.suffix in ("", ".bin")]
        (work / "asm").mkdir()
        ocloc.run(
            "disasm",
            "-file",
            str(binaries[0]),
            "-dump",
            "asm",
            "-device",
            device,
            cwd=work,
        )
        return asdict(machine.read(work / "asm", name))


def compile_all(
    launches: Sequence[Launch],
    devices: Sequence[str],
    ocloc: Ocloc,
    store: Store,
    *,
    jobs: int = 2,
    progress: Callable[[str], None] = print,
) -> list[Result]:
    """Compile launches, each kept by content, `jobs` at a time.

    Returns:
        One result a launch, in order: that of `compile_launch` with `cached`, or
        {"error": text} where the compiler failed.
    """
    versions = f"{FORMAT} {front_end()} {ocloc.version} {' '.join(devices)}"
    keys = [
        hashlib.sha256(f"{launch.key()} {versions}".encode()).hexdigest()
        for launch in launches
    ]
    results: dict[str, Result] = {}
    waiting: dict[str, Launch] = {}
    for key, launch in zip(keys, launches, strict=True):
        stored = store.results_get(f"aot-{key}")
        if stored is not None:
            results[key] = {**stored, "cached": True}
        else:
            waiting.setdefault(key, launch)
    for device in devices if waiting else ():
        properties(ocloc, device)
    total, done = len(waiting), 0
    running: dict[Connection, tuple[str, Launch, Any, float]] = {}
    fork = multiprocessing.get_context("fork")
    queue = list(waiting.items())
    while queue or running:
        while queue and len(running) < jobs:
            key, launch = queue.pop(0)
            ours, theirs = fork.Pipe(duplex=False)
            child = fork.Process(target=_child, args=(launch, devices, ocloc, theirs))
            child.start()
            theirs.close()
            running[ours] = (key, launch, child, time.monotonic())
        for ready in wait(list(running)):
            key, launch, child, started = running.pop(ready)
            try:
                result = ready.recv()
            except EOFError:
                child.join()
                result = {"error": f"the compiler ended with {child.exitcode}"}
            child.join()
            done += 1
            seconds = time.monotonic() - started
            progress(f"[{done}/{total}] {launch.name} {seconds:.1f} s")
            if "error" not in result:
                store.results_put(f"aot-{key}", result)
            results[key] = {**result, "cached": False}
    return [results[key] for key in keys]


def _child(
    launch: Launch, devices: Sequence[str], ocloc: Ocloc, pipe: Connection
) -> None:
    try:
        pipe.send(compile_launch(launch, devices, ocloc))
    except OclocError as error:
        pipe.send({"error": str(error)})
    except Exception:
        pipe.send({"error": traceback.format_exc(limit=-6)})
