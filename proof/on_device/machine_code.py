# SPDX-License-Identifier: Apache-2.0
"""`machine_code KIND KERNELS CACHE FILE`: what the driver made of compiled kernels.

CACHE is Triton's. Each kernel of KERNELS that it holds is loaded once more, so that
the driver's own compiler says which registers it took and how much it spilled.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST = 3
"""Variants of one kernel and launch that are loaded: those with the most code."""
MATRIX = re.compile(
    r"dpas|matrix_mad|MatrixMultiplyAccumulate|\bmma\.sync|\bwgmma\.mma_async"
)
LISTINGS = (".llir", ".ptx")
"""Texts in which matrix instructions are counted, the first that is there."""


def names(folder: Path) -> set[str]:
    """Names of the functions that a folder of kernels defines."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        found |= set(re.findall(r"^def (\w+)\(", path.read_text(), re.M))
    return found


def groups(cache: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The compiled kernels of a cache: their names and their files."""
    for path in sorted(cache.glob("*/__grp__*.json")):
        files = json.loads(path.read_text())["child_paths"]
        name = path.name.removeprefix("__grp__").removesuffix(".json")
        if all(Path(file).is_file() for file in files.values()):
            yield name, files


def matrix_instructions(files: dict[str, str]) -> int:
    """Lines of a listing that are calls of the matrix unit, declarations left out."""
    for suffix in LISTINGS:
        for name, path in files.items():
            if name.endswith(suffix):
                lines = Path(path).read_text().splitlines()
                calls = [
                    x for x in lines if not x.startswith(("declare", "attributes"))
                ]
                return sum(bool(MATRIX.search(line)) for line in calls)
    return 0


def load(files: dict[str, str]) -> tuple[int, int]:
    """Registers and spill that the driver reports, as Triton passes them on."""
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime.driver import driver

    # No launch follows, so no launcher is compiled.
    driver.active.launcher_cls = lambda source, metadata: None
    kernel = CompiledKernel(None, files, "")
    kernel._init_handles()
    return kernel.n_regs, kernel.n_spills


def main(kernels: Path, cache: Path, target: Path) -> None:
    ours = names(kernels)
    variants: dict[tuple[str, int, str], list[dict[str, str]]] = {}
    for name, files in groups(cache):
        if name not in ours:
            continue
        metadata = json.loads(Path(files[f"{name}.json"]).read_text())
        mode = str(metadata.get("grf_mode", ""))
        key = (name, metadata["num_warps"], mode)
        variants.setdefault(key, []).append(files)
    rows: list[dict[str, Any]] = []
    for (name, warps, mode), found in sorted(variants.items()):
        found.sort(key=lambda f: -sum(Path(p).stat().st_size for p in f.values()))
        row: dict[str, Any] = {
            "kernel": name,
            "warps": warps,
            "grf": mode,
            "variants": len(found),
            "registers": 0,
            "spill": 0,
            "matrix": max(map(matrix_instructions, found)),
            "problem": "",
        }
        for files in found[:MOST]:
            try:
                registers, spill = load(files)
                row["registers"] = max(row["registers"], registers)
                row["spill"] = max(row["spill"], spill)
            except Exception as error:
                row["problem"] = f"{type(error).__name__}: {str(error)[:200]}"
        rows.append(row)
        print(f"{name}: spill {row['spill']}", flush=True)
        target.write_text(json.dumps(rows))
    target.write_text(json.dumps(rows))


if __name__ == "__main__":
    import torch

    getattr(torch, sys.argv[1]).init()
    main(*map(Path, sys.argv[2:5]))
