# SPDX-License-Identifier: Apache-2.0
"""The parts of a benchmark case: candidates, and the check before any is timed."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .files import FLASHMLA_FOLDER, WHEEL_FOLDER
from .upstream import importing

UPSTREAM_FOLDER = "0.33.0"
OURS, UPSTREAM, FLASHMLA, TORCH = "ours", "upstream 0.33.0", "FlashMLA", "torch"
TWO_LAUNCHES = "ours, two launches"
SYCL, SYCL_MODULE = "vllm-xpu-kernels", "vllm_xpu_kernels._xpu_C"


@dataclass(frozen=True)
class Candidate:
    """One implementation on the inputs of a case.

    Attributes:
        name: whose implementation it is.
        calls: the same work on each input set.
        result: the output of the call on the first input set.
        reference: what `result` should be, in float64.
        tolerance: largest allowed relative error, root mean square.
        capture: whether it can be captured in a graph.
        note: what a reader of the figure must know.
    """

    name: str
    calls: Sequence[Callable[[], Any]]
    result: Callable[[], torch.Tensor]
    reference: Callable[[], torch.Tensor]
    tolerance: float = 3e-3
    capture: bool = True
    note: str = ""

    def check(self) -> str:
        """Run once and compare; empty if right, else what is wrong."""
        self.calls[0]()
        actual, expected = self.result().double(), self.reference().double()
        if actual.shape != expected.shape:
            return f"shape {list(actual.shape)} instead of {list(expected.shape)}"
        finite = expected.isfinite()
        if not torch.equal(actual.isfinite(), finite):
            return "infinite or undefined values at other places"
        actual, expected = actual[finite], expected[finite]
        scale = expected.square().mean().sqrt().clamp(min=1e-30)
        error = float((actual - expected).square().mean().sqrt() / scale)
        if not error <= self.tolerance:
            return f"relative error {error:.2e}, {self.tolerance:.0e} is allowed"
        return ""


@dataclass(frozen=True)
class Case:
    """One shape of one op.

    Attributes:
        op: name of the op.
        tokens: queries.
        heads: attention heads; 0 where the op has none.
        keys: keys per query; 0 where the op has none.
        traffic: bytes that must move.
        operations: multiply-adds on the matrix unit, counted twice.
        candidates: makes them when the case runs, so that only one case holds memory.
    """

    op: str
    tokens: int
    heads: int
    keys: int
    traffic: float
    operations: float
    candidates: Callable[[], list[Candidate]]

    @property
    def label(self) -> str:
        """The case's name in the output."""
        parts = [f"T{self.tokens}"]
        parts += [f"H{self.heads}"] if self.heads else []
        parts += [f"K{self.keys}"] if self.keys else []
        return f"{self.op} {' '.join(parts)}"


@dataclass
class Competitors:
    """The other implementations, as far as the folder has them.

    Attributes:
        folder: the one that `lab.benchmarks.prepare` filled.
        load: imports a file by its path inside its release.
        missing: which ones are not there, and why.
    """

    folder: Path
    load: Callable[[str], ModuleType]
    missing: list[str] = field(default_factory=list)

    def upstream(self, path: str) -> ModuleType | None:
        """A kernel file of vLLM 0.33.0."""
        if (self.folder / UPSTREAM_FOLDER / path).is_file():
            return self.load(path)
        self.missing.append(f"upstream's {path}: run python -m lab.benchmarks.prepare")
        return None

    def sycl(self, name: str) -> Callable[..., Any] | None:
        """An op of the installed vllm-xpu-kernels; on other devices there is none."""
        try:
            importlib.import_module(SYCL_MODULE)
        except ImportError as error:
            if torch.xpu.is_available():
                self.missing.append(f"{SYCL}: {error}")
            return None
        op: Callable[..., Any] | None = getattr(torch.ops._xpu_C, name, None)
        if op is None:
            self.missing.append(f"{SYCL} has no {name}")
        return op

    def flashmla(self) -> ModuleType | None:
        """FlashMLA's interface, with its extension loaded."""
        library = self.folder / FLASHMLA_FOLDER / "vllm/_flashmla_C.abi3.so"
        if not torch.cuda.is_available():
            return None
        try:
            torch.ops.load_library(str(library.absolute()))
        except OSError as error:
            self.missing.append(f"FlashMLA: {error}")
            return None
        return self.load("vllm/third_party/flashmla/flash_mla_interface.py")


@contextmanager
def competitors_in(folder: Path) -> Iterator[Competitors]:
    """The implementations under `folder`, importable while the context lasts."""
    roots = (
        folder / UPSTREAM_FOLDER,
        folder / FLASHMLA_FOLDER,
        folder / WHEEL_FOLDER,
    )
    with importing(*roots) as load:
        yield Competitors(folder, load)
