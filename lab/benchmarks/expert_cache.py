# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.expert_cache`: a layer whose experts lie in host memory.

Prints what a captured decode step takes: with all experts on the device; with slots for
a tenth, a quarter and a half of them, on a routing with the locality that was published
(llama.cpp#27861); with all its experts in slots; and with experts read in place, as
vLLM's UVA offload does. Then what a chunk of a prompt takes, whose waves are copied one
after another, or while another computes. Before, the link: the copy engine, and the
kernel that fetches; and the host's own memory. `--out` keeps all of it in `link.json`.
"""

import argparse
import importlib
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import triton

from kernels.xpu_dsv4.moe.expert_cache import (
    ExpertCache,
    Weights,
    cached_experts,
    fetch_experts,
    make_expert_cache,
)
from kernels.xpu_dsv4.moe.expert_waves import overlapped_experts
from kernels.xpu_dsv4.moe.experts import routed_experts
from standins.emulated_xpu.on_cuda import device_api

from .device import add_device, describe, take_device
from .measure import Clock

LOCAL, RECENT = 0.76, 88
"""How often a choice is one of so many before it. An LRU cache of an eighth of 256
experts then hits 67 %, of a quarter 81 %, as published (6,000 steps, 4 seeds)."""
LIMIT = 10.0
TOKENS = (1, 4)
"""Of a step. With more, a tenth of the experts does not suffice for a wave."""
SHARES = (0.1, 0.23, 0.49)
"""Of a layer's experts, that have a slot."""
FEW_SLOTS = 16
"""For which one B70 has room."""


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer and its routing.

    A captured graph replays `steps` from the first on. With few of them, that jump
    hides the locality which the routing has.
    """

    experts: int = 256
    topk: int = 6
    hidden: int = 4096
    intermediate: int = 2048
    steps: int = 1024
    chunk: int = 8192


@dataclass(frozen=True)
class Chunk:
    """Milliseconds of a layer for a chunk of a prompt, by where its experts lie.

    Attributes:
        resident: all on the device.
        waves: in slots, a wave after the other.
        overlapped: in slots, a wave copied while another computes.
    """

    tokens: int
    slots: int
    resident: float
    waves: float
    overlapped: float

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, {self.slots} slots: {self.overlapped:.1f} ms; one "
            f"wave after the other {self.waves:.1f} ms; on the device "
            f"{self.resident:.1f} ms"
        )


@dataclass(frozen=True)
class Step:
    """What a captured step of `tokens` takes.

    Attributes:
        experts: where they lie.
        microseconds: median of a layer.
        hits: share of experts that had a slot; None where there are no slots.
        uva: median of vLLM's UVA offload with as much device memory.
    """

    tokens: int
    experts: str
    microseconds: float
    hits: float | None = None
    uva: float | None = None

    def __str__(self) -> str:
        said = f"{self.tokens} tokens, {self.experts}: {self.microseconds:.1f} us"
        if self.hits is None or self.uva is None:
            return said
        return (
            f"{said}, {self.hits:.1%} hits; UVA offload with as much memory "
            f"{self.uva:.1f} us, {self.uva / self.microseconds:.2f} times"
        )


def device_view(pinned: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pinned host memory as the device reads it.

    Raises:
        ImportError: on an XPU, without vllm-xpu-kernels, which has the op.
    """
    if device.type == "cuda":
        return device_api.device_view(pinned)
    importlib.import_module("vllm_xpu_kernels._C")
    view: torch.Tensor = torch.ops._C.get_xpu_view_from_cpu_tensor(pinned)
    return view


def host_weights(layer: Layer, device: torch.device) -> Weights:
    """Random experts in pinned host memory, as the device reads them."""

    def part(rows: int, width: int) -> torch.Tensor:
        shape = (layer.experts, rows, width)
        on_cpu = device.type == "cpu"
        made = torch.empty(shape, dtype=torch.uint8, pin_memory=not on_cpu)
        values = torch.randint(118, 123, shape, dtype=torch.uint8, device=device)
        made.copy_(values)
        return made if on_cpu else device_view(made, device)

    columns, hidden = layer.intermediate, layer.hidden
    return (
        part(2 * columns, hidden // 2),
        part(2 * columns, hidden // 32),
        part(hidden, columns // 2),
        part(hidden, columns // 32),
    )


def routing(layer: Layer, tokens: int, device: torch.device) -> Iterator[torch.Tensor]:
    """The choices of one step after another, `[tokens, topk]` each."""
    rng, recent = random.Random(0), list(range(RECENT))
    for _ in range(layer.steps // tokens):
        rows = []
        for _ in range(tokens):
            chosen: list[int] = []
            while len(chosen) < layer.topk:
                near = rng.random() < LOCAL
                expert = rng.choice(recent) if near else rng.randrange(layer.experts)
                expert %= layer.experts
                if expert not in chosen:
                    chosen.append(expert)
            recent = (recent + chosen)[-RECENT:]
            rows.append(chosen)
        yield torch.tensor(rows, dtype=torch.int32, device=device)


def link(cache: ExpertCache, layer: Layer, clock: Clock) -> Iterator[tuple[str, float]]:
    """GB/s of the copy engine, of a launch that fetches a token's experts, and of a
    copy within the host's memory, read and written."""
    ids = [
        torch.arange(first, first + layer.topk, dtype=torch.int32)[None].to(
            clock.device
        )
        for first in (0, layer.topk)
    ]
    size = layer.topk * cache.expert_bytes

    def copies() -> None:
        for held, whole in zip(cache.slots, cache.host, strict=True):
            held[: layer.topk].copy_(whole[: layer.topk], non_blocking=True)

    yield "copy engine", size / clock.direct([copies]) / 1e3
    # As many slots as a token has experts: every step misses all.
    calls = [partial(fetch_experts, cache, chosen) for chosen in ids]
    yield "fetch", size / (clock.captured(calls) or clock.direct(calls)) / 1e3
    # Larger than the host's last-level cache.
    source = torch.zeros(1 << (16 if clock.on_cpu else 30), dtype=torch.uint8)
    target = torch.zeros_like(source)
    taken = Clock(torch.device("cpu")).direct([lambda: target.copy_(source)] * 4)
    yield "host memory", 2 * len(source) / taken / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of link.json")
    parser.add_argument("--seconds", type=float, default=540, help="stop after that")
    add_device(parser)
    options = parser.parse_args()
    started = time.monotonic()
    device = take_device(options.device)
    layer = Layer(8, 2, 64, 32, 4, 16) if device.type == "cpu" else Layer()
    print(f"{describe(device)}, torch {torch.__version__}, Triton {triton.__version__}")
    clock = Clock(device)
    host = host_weights(layer, device)
    rates = {}
    for name, rate in link(make_expert_cache(host, layer.topk, device), layer, clock):
        print(f"{name}: {rate:.1f} GB/s", flush=True)
        rates[name] = rate
    w13, w13_scale, w2, w2_scale = (part.clone() for part in host)
    resident = w13, w13_scale, w2, w2_scale
    found: dict[str, Any] = {"gb_per_second": rates, "steps": [], "chunks": []}
    steps = [times(tokens, layer, host, resident, clock) for tokens in TOKENS]
    rows: Iterator[Step | Chunk] = chain(*steps, chunks(layer, host, resident, clock))
    for row in rows:
        print(row, flush=True)
        found["steps" if isinstance(row, Step) else "chunks"].append(asdict(row))
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "link.json").write_text(json.dumps(found, indent=1))
        if time.monotonic() - started > options.seconds:
            return


def times(
    tokens: int, layer: Layer, host: Weights, resident: Weights, clock: Clock
) -> Iterator[Step]:
    """What a step takes, by where its experts lie; equal bits are checked before."""
    device = clock.device
    x = torch.randn(tokens, layer.hidden, device=device).bfloat16()
    weights = torch.rand(tokens, layer.topk, device=device)
    steps = list(routing(layer, tokens, device))

    def took(run: Callable[[torch.Tensor], torch.Tensor]) -> float:
        for ids in steps[:8]:
            if not torch.equal(run(ids), plain(resident, ids)):
                raise SystemExit("results differ from those of residents")
        calls = [partial(run, ids) for ids in steps]
        return clock.captured(calls) or clock.direct(calls)

    def plain(parts: Weights, ids: torch.Tensor) -> torch.Tensor:
        return routed_experts(x, *parts, weights, ids, swiglu_limit=LIMIT)

    def cached(cache: ExpertCache, ids: torch.Tensor) -> torch.Tensor:
        return cached_experts(x, cache, weights, ids, LIMIT)

    here = took(partial(plain, resident))
    yield Step(tokens, "on the device", here)
    there = took(partial(plain, host))
    yield Step(tokens, "read in place", there)
    for share in (*SHARES, 1.0):
        slots = max(int(share * layer.experts), layer.topk)
        cache = make_expert_cache(host, slots, device)
        microseconds = took(partial(cached, cache))
        _, hits, misses, _ = cache.counts.tolist()
        # UVA offload keeps whole layers on the device, as many as memory holds.
        uva = (slots * here + (layer.experts - slots) * there) / layer.experts
        share_of_hits = hits / (hits + misses)
        yield Step(tokens, f"{slots} slots", microseconds, share_of_hits, uva)


def chunks(
    layer: Layer, host: Weights, resident: Weights, clock: Clock
) -> Iterator[Chunk]:
    """What a chunk of a prompt takes; equal bits are checked before."""
    device, tokens = clock.device, layer.chunk
    x = torch.randn(tokens, layer.hidden, device=device).bfloat16()
    weights = torch.rand(tokens, layer.topk, device=device)
    ids = torch.rand(tokens, layer.experts, device=device).topk(layer.topk)[1].int()

    def plain() -> torch.Tensor:
        return routed_experts(x, *resident, weights, ids, swiglu_limit=LIMIT)

    def took(run: Callable[[], torch.Tensor]) -> float:
        if not torch.equal(run(), plain()):
            raise SystemExit("results differ from those of residents")
        return clock.direct([run]) / 1e3

    here = took(plain)
    for slots in (FEW_SLOTS, *(int(share * layer.experts) for share in SHARES)):
        slots = min(max(slots, 2), layer.experts // 2)
        waves, overlapped = (
            took(partial(form, x, cache, weights, ids, LIMIT))
            for form in (cached_experts, overlapped_experts)
            for cache in [make_expert_cache(host, slots, device)]
        )
        yield Chunk(tokens, slots, here, waves, overlapped)


if __name__ == "__main__":
    main()
