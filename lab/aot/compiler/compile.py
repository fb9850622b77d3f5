# SPDX-License-Identifier: Apache-2.0
"""Compile a recorded launch to Intel machine code: Triton → SPIR-V → ocloc → counts.

The front end is triton-xpu without its driver. Its backend class gets the device
properties that ocloc reports, so this needs no device and no SYCL runtime. Each launch
compiles in a forked child, because some errors of the compiler abort the process.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import multiprocessing
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Protocol

from triton._C.libtriton import intel, ir
from triton.backends.compiler import GPUTarget
from triton.backends.intel.compiler import XPUBackend
from triton.compiler import ASTSource

from lab.aot.calls.record import Launch
from lab.aot.compiler.machine import read
from lab.aot.compiler.ocloc import Ocloc, OclocError
from stack.core.errors import StackError

EXPONENTIALS = ("math.exp", "math.exp2")
DEVICES = ("pvc", "bmg", "lnl", "ptl")
SAME_CODE = {"lnl": "bmg"}
"""Device → the one whose machine code it has: both are Xe2. A test compares what ocloc
makes for them."""
FLAGS = {
    "128": "-cl-intel-128-GRF-per-thread",
    "256": "-cl-intel-256-GRF-per-thread",
    "auto": "-cl-intel-enable-auto-large-GRF-mode",
    "": "",
}
FORMAT = 11
"""Version of the stored results; raise it when their content changes."""

CompileResult = dict[str, Any]
"""What `compile_launch` returns, or {"error": text}."""
Properties = dict[str, Any]


class ResultStore(Protocol):
    """Where results are kept between runs."""

    def results_get(self, key: str) -> CompileResult | None: ...
    def results_put(self, key: str, value: CompileResult) -> None: ...


def front_end() -> str:
    """Name and version of the Triton that is installed here."""
    return f"triton-xpu {importlib.metadata.version('triton-xpu')}"


class _Backend(XPUBackend):
    """triton-xpu's backend without its architecture parser, which needs SYCL."""

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


@dataclass(frozen=True)
class SpirvModule:
    """What the front end makes of a launch.

    Attributes:
        binary: the SPIR-V.
        kernel: name of the kernel in it.
        ttgir: text of Triton's GPU dialect, from which it was made.
        threads_per_warp: lanes of a sub-group.
        slm: bytes of shared local memory per work-group.
    """

    binary: bytes
    kernel: str
    ttgir: str
    threads_per_warp: int
    slm: int


def to_spirv(launch: Launch, arch: Properties) -> SpirvModule:
    """Run the front end on one launch for devices with these properties."""
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
    metadata: dict[str, Any] = {"num_warps": launch.num_warps}
    module = backend.make_ttir(module, metadata, options)
    module = backend.make_ttgir(module, metadata, options, backend.properties)
    ttgir = str(module)
    metadata["threads_per_warp"] = intel.get_threads_per_warp(module)
    llvm_ir = backend.make_llir(module, metadata, options)
    binary = backend.make_spv(llvm_ir, metadata, options)
    return SpirvModule(
        binary,
        metadata["name"],
        ttgir,
        metadata["threads_per_warp"],
        metadata["shared"],
    )


def dots(ttgir: str) -> list[dict[str, Any]]:
    """The matrix products of a kernel, and how the sub-groups share their results.

    Returns:
        For each `tt.dot`: `shape` of its result, `warps` along each axis of it (None
        where the product is not on the matrix unit), `of_probabilities`, true if an
        operand comes from an exponential: a PV product, and `transposed`, true if that
        is the right operand: V first.
    """
    layouts = {
        name: [int(n) for n in warps.split(",")]
        for name, warps in re.findall(
            r"^(#\w+) = #triton_intel_gpu\.dpas<\{.*?warpsPerCTA = \[([\d, ]+)\]",
            ttgir,
            re.M,
        )
    }
    products: list[dict[str, Any]] = []
    scopes: list[dict[str, bool]] = [{}]
    for line in ttgir.splitlines():
        text = line.strip()
        if text.startswith("}") and len(scopes) > 1:
            scopes.pop()
        match = re.match(r"(%[\w-]+)(?::\d+)? = (?:\"?)([\w.]+)(.*)", text)
        if match:
            name, operation, rest = match.groups()
            operands = [
                _from_exponential(scopes, operand)
                for operand in re.findall(r"%[\w-]+", rest)
            ]
            scopes[-1][name] = operation in EXPONENTIALS or any(operands)
            result = re.search(r"-> tensor<([\dx]+)x\w+, (#\w+)>", rest)
            if operation == "tt.dot" and result:
                products.append(
                    {
                        "shape": [int(n) for n in result[1].split("x")],
                        "warps": layouts.get(result[2]),
                        "of_probabilities": operands[0] or operands[1],
                        "transposed": operands[1],
                    }
                )
        if text.endswith("{"):
            scopes.append({})
    return products


def _from_exponential(scopes: list[dict[str, bool]], name: str) -> bool:
    """Whether the value `name` comes from an exponential. A name is unique in its
    region and those around it, not in the whole function."""
    for scope in reversed(scopes):
        if name in scope:
            return scope[name]
    return False


def own_code(devices: Sequence[str]) -> list[str]:
    """`devices` without those that have the machine code of another of them."""
    return [device for device in devices if SAME_CODE.get(device) not in devices]


def for_devices(result: CompileResult, devices: Sequence[str]) -> CompileResult:
    """The result of a compilation for `own_code(devices)`, with all `devices`."""
    if "error" in result:
        return result
    codes = result["devices"]
    named = {d: codes[d if d in codes else SAME_CODE[d]] for d in devices}
    return {**result, "devices": named}


def compile_launch(
    launch: Launch, devices: Sequence[str], ocloc: Ocloc, store: ResultStore
) -> CompileResult:
    """Compile one launch for `devices`.

    Launches whose SPIR-V is the same share what `store` has of its machine code.

    Returns:
        {"dots": …, "threads_per_warp": …, "devices": {device: resources}}.
    """
    modules: dict[str, SpirvModule] = {}
    result: CompileResult = {"devices": {}}
    for device in devices:
        arch = properties(ocloc, device)
        label = json.dumps(arch, sort_keys=True)
        if label not in modules:
            modules[label] = to_spirv(launch, arch)
        module = modules[label]
        result["dots"] = dots(module.ttgir)
        result["threads_per_warp"] = module.threads_per_warp
        code = _counted(module, device, launch.grf, ocloc, store)
        result["devices"][device] = {**code, "slm": module.slm}
    return result


def _counted(
    module: SpirvModule, device: str, grf: str, ocloc: Ocloc, store: ResultStore
) -> CompileResult:
    """What the machine code of a module does on one device."""
    made_by = f"{FORMAT} {ocloc.version} {device} {FLAGS[grf]} {module.kernel} "
    digest = hashlib.sha256(made_by.encode() + module.binary).hexdigest()
    code = store.results_get(f"aot-code-{digest}")
    if code is None:
        with tempfile.TemporaryDirectory() as folder:
            listed = disassembled(module, device, grf, ocloc, Path(folder))
            code = asdict(read(listed, module.kernel))
        # A cache that cannot be written ends the run where it keeps the whole result.
        with contextlib.suppress(StackError):
            store.results_put(f"aot-code-{digest}", code)
    return code


def disassembled(
    module: SpirvModule, device: str, grf: str, ocloc: Ocloc, work: Path
) -> Path:
    """Compile a module for one device in the folder `work`; where its listing lies."""
    (work / "kernel.spv").write_bytes(module.binary)
    arguments = ["-file", "kernel.spv", "-spirv_input", "-device", device]
    arguments += ["-output", "kernel", "-output_no_suffix", "-out_dir", "out"]
    if FLAGS[grf]:
        arguments += ["-options", FLAGS[grf]]
    ocloc.run("compile", "-q", *arguments, cwd=work)
    binaries = [p for p in (work / "out").iterdir() if p.suffix in ("", ".bin")]
    (work / "asm").mkdir()
    arguments = ["-file", str(binaries[0]), "-dump", "asm", "-device", device]
    ocloc.run("disasm", *arguments, cwd=work)
    return work / "asm"


def compile_all(
    launches: Sequence[Launch],
    devices: Sequence[str],
    ocloc: Ocloc,
    store: ResultStore,
    *,
    jobs: int = 2,
    progress: Callable[[str], None] = print,
) -> list[CompileResult]:
    """Compile launches, `jobs` at a time; `store` keeps the results by content.

    Returns:
        One result per launch, in order: that of `compile_launch` with `cached`, or
        {"error": text} where the compiler failed.
    """
    versions = f"{FORMAT} {front_end()} {ocloc.version} {' '.join(devices)}"
    keys = [
        hashlib.sha256(f"{launch.key()} {versions}".encode()).hexdigest()
        for launch in launches
    ]
    results: dict[str, CompileResult] = {}
    missing: dict[str, Launch] = {}
    for key, launch in zip(keys, launches, strict=True):
        stored = store.results_get(f"aot-{key}")
        if stored is not None:
            # A store may sort them, and reports show them in the order asked for.
            codes = {device: stored["devices"][device] for device in devices}
            results[key] = {**stored, "devices": codes, "cached": True}
        else:
            missing.setdefault(key, launch)
    compiled = _compiled(missing, devices, ocloc, store, jobs)
    for count, (key, result, seconds) in enumerate(compiled, start=1):
        progress(f"[{count}/{len(missing)}] {missing[key].name} {seconds:.1f} s")
        if "error" not in result:
            store.results_put(f"aot-{key}", result)
        results[key] = {**result, "cached": False}
    return [results[key] for key in keys]


def _compiled(
    launches: Mapping[str, Launch],
    devices: Sequence[str],
    ocloc: Ocloc,
    store: ResultStore,
    jobs: int,
) -> Iterator[tuple[str, CompileResult, float]]:
    """Compile launches in children: the key, result and seconds of each as it ends."""
    for device in devices if launches else ():
        # Asked once here, not in every child.
        properties(ocloc, device)
    running: dict[Connection, tuple[str, ForkProcess, float]] = {}
    fork = multiprocessing.get_context("fork")
    queue = list(launches.items())
    while queue or running:
        while queue and len(running) < jobs:
            key, launch = queue.pop(0)
            ours, theirs = fork.Pipe(duplex=False)
            child = fork.Process(
                target=_child, args=(launch, devices, ocloc, store, theirs)
            )
            child.start()
            theirs.close()
            running[ours] = (key, child, time.monotonic())
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            key, child, started = running.pop(ready)
            try:
                result = ready.recv()
            except EOFError:
                child.join()
                result = {"error": f"the compiler ended with {child.exitcode}"}
            child.join()
            yield key, result, time.monotonic() - started


def _child(
    launch: Launch,
    devices: Sequence[str],
    ocloc: Ocloc,
    store: ResultStore,
    pipe: Connection,
) -> None:
    try:
        pipe.send(compile_launch(launch, devices, ocloc, store))
    except OclocError as error:
        pipe.send({"error": str(error)})
    except Exception:
        pipe.send({"error": traceback.format_exc(limit=-6)})
