# SPDX-License-Identifier: Apache-2.0
"""A cache of experts in plain Python: the least used of late goes first."""

from dataclasses import dataclass, field


@dataclass
class ExpertCache:
    """See `kernels.xpu_dsv4.moe.expert_cache.ExpertCache`.

    Attributes:
        experts: E, all of them in host memory.
        slots: the expert of each slot, or -1; S of them.
        heat: how much each slot was used of late.
        wave: waves so far.
        hits: experts that a step needed and that had a slot.
        misses: experts that were read from host memory.

    """

    experts: int
    slots: list[int]
    heat: list[int] = field(init=False)
    wave: int = 0
    hits: int = 0
    misses: int = 0

    def __post_init__(self) -> None:
        self.heat = [0] * len(self.slots)

    def step(self, ids: list[int], tokens: int = 1) -> list[dict[int, int]]:
        """Serve a step; the slot of each expert, wave by wave, as long as one waits."""
        needed = sorted({expert for expert in ids if 0 <= expert < self.experts})
        here = {e: self.slots.index(e) for e in needed if e in self.slots}
        missing = [expert for expert in needed if expert not in here]
        self.hits += len(here)
        self.heat = [heat - heat * min(tokens, 4) // 8 for heat in self.heat]
        waves = []
        while here or missing:
            self.wave += 1
            while missing and len(here) < len(self.slots):
                free = [s for s in range(len(self.slots)) if s not in here.values()]
                slot = min(free, key=lambda s: self.heat[s])
                expert = missing.pop(0)
                self.slots[slot], self.heat[slot] = expert, 0
                here[expert] = slot
                self.misses += 1
            for slot in here.values():
                self.heat[slot] += 2**20
            waves.append(here)
            here = {}
        return waves
