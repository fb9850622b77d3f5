# SPDX-License-Identifier: Apache-2.0
"""Model what a kernel's machine code costs on a device: an estimate, no measurement.

A work-group stays on one Xe-core. Its sub-groups share the vector engines, each of
which issues one instruction per clock, and the matrix engines, the shared local memory
and the load and store unit beside them. That one moves bytes, and where each lane of a
load has a cache line of its own it looks up lines. Whichever of these is busy longest
bounds the time of the work-groups that an Xe-core holds at once; a sub-group's own
chain of dependent instructions bounds it where few are there to hide it, and the bytes
that must come from DRAM bound the whole launch. A rare arm of the loop (`loops`) is
charged once.
What one launch leaves for the next stays in the second-level cache where half of that
holds it. The model leaves out clock changes under load, bank conflicts and the launch
itself.

Constants are in `devices.toml`, with their sources. Some are known as a range: `ends`
has a device at both ends of it.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.aot.compiler.loops import Work

DATA = Path(__file__).parents[1] / "devices.toml"
_FREE = (
    "clocks_per_dependent_instruction",
    "load_latency",
    "barrier_latency",
    "lines_per_clock",
)
"""What is known as a range alone; `devices` takes the fast end."""
LARGE_GRF = 128
"""Registers per thread above which an Xe-core holds half as many threads."""


@dataclass(frozen=True)
class Device:
    """A device as the model sees it.

    Attributes:
        name: of the product.
        target: name of its machine code.
        xe_cores: of the device.
        gigahertz: clock.
        gigabytes_per_second: of its DRAM.
        second_level: bytes of its second-level cache.
        vector_engines: of one Xe-core.
        threads: hardware threads of one Xe-core with 128 registers each.
        slm: bytes of shared local memory that the work-groups of an Xe-core can have.
        slm_bytes_per_clock: of shared local memory, per Xe-core.
        memory_bytes_per_clock: of loads and stores that the first cache serves.
        dpas_clocks: of one dpas.8x8.
        clocks_per_dependent_instruction: per thread, where no other thread overlaps.
        load_latency: clocks from a load to its data.
        barrier_latency: clocks of one barrier.
        lines_per_clock: cache lines that an Xe-core looks up.
    """

    name: str
    target: str
    xe_cores: int
    gigahertz: float
    gigabytes_per_second: float
    second_level: float
    vector_engines: int
    threads: int
    slm: int
    slm_bytes_per_clock: float
    memory_bytes_per_clock: float
    dpas_clocks: float
    clocks_per_dependent_instruction: float
    load_latency: float
    barrier_latency: float
    lines_per_clock: float


@dataclass(frozen=True)
class Launched:
    """One launch, as the model needs it.

    Attributes:
        groups: work-groups.
        sub_groups: of one work-group.
        turns: iterations of the longest loop, per sub-group.
        traffic: bytes that come from DRAM or go there.
        grf: registers per thread.
        slm: bytes of shared local memory per work-group.
        total: what the listing executes once.
        loop: what one iteration of that loop executes.
        partials: bytes that the launch writes for the next, or reads of the one before.
        lane_bytes: that a load takes of each cache line it looks up; 0 leaves lookups
            out.
        lines: that a sub-group looks up besides, once.
        around: what an iteration of a loop around that one executes besides.
        rounds: iterations of the loop around.
    """

    groups: int
    sub_groups: int
    turns: int
    traffic: float
    grf: int
    slm: int
    total: Work
    loop: Work
    partials: float = 0
    lane_bytes: int = 0
    lines: int = 0
    around: Work = field(default_factory=Work)
    rounds: int = 1


@dataclass(frozen=True)
class Estimate:
    """Modelled time of one launch or of several in a row.

    Attributes:
        microseconds: on the device alone.
        bound: what binds: "issue", "dpas", "math", "SLM", "load", "lookup",
            "latency" or "DRAM".
    """

    microseconds: float
    bound: str


def devices() -> list[Device]:
    """The devices of `devices.toml`, in its order."""
    data = tomllib.loads(DATA.read_text())
    return [
        Device(
            name=name,
            # What was measured on a device wins over what its architecture says.
            **{
                **{name: data["range"][name][0] for name in _FREE},
                **_fixed(data["architecture"][device["target"]]),
                **_fixed(device),
            },
        )
        for name, device in data["device"].items()
    ]


def ends(device: Device) -> tuple[Device, Device]:
    """The device at the fast and at the slow end of what is known as a range."""
    data = tomllib.loads(DATA.read_text())
    known = {**data["range"], **data["device"].get(device.name, {})}
    fast, slow = (
        replace(
            device,
            slm_bytes_per_clock=known["slm_bytes_per_clock"][end],
            gigabytes_per_second=device.gigabytes_per_second * known["dram_share"][end],
            **{name: known[name][end] for name in _FREE},
        )
        for end in (0, 1)
    )
    return fast, replace(slow, second_level=0)


def _fixed(table: Mapping[str, Any]) -> dict[str, Any]:
    """What a device is at any end of a range."""
    return {
        name: value
        for name, value in table.items()
        if name != "source" and not isinstance(value, list)
    }


def launched(
    code: Mapping[str, Any],
    groups: int,
    sub_groups: int,
    turns: int,
    traffic: float,
    partials: float = 0,
    lane_bytes: int = 0,
    lines: int = 0,
    rounds: int = 1,
) -> Launched:
    """A launch of `code`, which is what `compile_launch` returns of one device."""
    return Launched(
        groups=groups,
        sub_groups=sub_groups,
        turns=turns,
        traffic=traffic,
        grf=code["grf"],
        slm=code["slm"],
        total=Work(**code["total"]),
        loop=Work(**code["loop"]),
        partials=partials,
        lane_bytes=lane_bytes,
        lines=lines,
        around=Work(**code["around"]),
        rounds=rounds,
    )


def resident(launch: Launched, device: Device) -> int:
    """Work-groups that an Xe-core holds at once.

    Raises:
        ValueError: it cannot hold one.
    """
    threads = device.threads // (2 if launch.grf > LARGE_GRF else 1)
    groups = threads // launch.sub_groups
    if launch.slm:
        groups = min(groups, device.slm // launch.slm)
    if groups < 1:
        raise ValueError(
            f"{device.name}: an Xe-core cannot hold {launch.sub_groups} sub-groups "
            f"of {launch.grf} registers and {launch.slm} bytes of SLM"
        )
    return groups


def estimate(launch: Launched, device: Device) -> Estimate:
    """Model one launch."""
    at_once = resident(launch, device)
    here = math.ceil(launch.groups / device.xe_cores)
    clocks: dict[str, float] = {}
    waves = [at_once] * (here // at_once) + [here % at_once] * (here % at_once > 0)
    worst = ""
    for size in set(waves):
        bounds = _wave(launch, device, size)
        bound = max(bounds, key=lambda name: bounds[name])
        clocks[bound] = clocks.get(bound, 0) + bounds[bound] * waves.count(size)
        if size == waves[0]:
            worst = bound
    busy = sum(clocks.values()) / device.gigahertz / 1e3
    cached = launch.partials <= device.second_level / 2
    dram = memory_roof(launch.traffic + (0 if cached else launch.partials), device)
    return Estimate(max(busy, dram), "DRAM" if dram > busy else worst)


def memory_roof(traffic: float, device: Device) -> float:
    """Microseconds to move `traffic` bytes from or to DRAM."""
    return traffic / device.gigabytes_per_second / 1e3


def together(estimates: list[Estimate]) -> Estimate:
    """Launches one after the other; the longest names the bound."""
    longest = max(estimates, key=lambda item: item.microseconds)
    return Estimate(sum(item.microseconds for item in estimates), longest.bound)


def _wave(launch: Launched, device: Device, groups: int) -> dict[str, float]:
    """Clocks of `groups` work-groups that share an Xe-core, by what bounds them."""
    sub_groups = groups * launch.sub_groups
    # A vector engine that has one sub-group more than the others ends last.
    per_engine = math.ceil(sub_groups / device.vector_engines)
    once, turn = launch.total, launch.loop

    def executed(name: str) -> float:
        """What one sub-group executes; the listing has one iteration of each loop."""
        each: float = getattr(turn, name)
        again: float = (launch.rounds - 1) * getattr(launch.around, name)
        return float(getattr(once, name)) + (launch.turns - 1) * each + again

    loads = (launch.turns if turn.sends else 0) + 1
    lines: float = launch.lines
    lines += executed("memory") / launch.lane_bytes if launch.lane_bytes else 0
    return {
        "issue": per_engine * executed("cycles"),
        "dpas": per_engine * executed("dpas") * device.dpas_clocks,
        "math": per_engine * executed("math"),
        "SLM": sub_groups * executed("slm") / device.slm_bytes_per_clock,
        "load": sub_groups * executed("memory") / device.memory_bytes_per_clock,
        "lookup": sub_groups * lines / device.lines_per_clock,
        "latency": executed("cycles") * device.clocks_per_dependent_instruction
        + loads * device.load_latency
        + executed("barriers") * device.barrier_latency,
    }
