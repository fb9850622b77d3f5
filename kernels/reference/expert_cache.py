# SPDX-License-Identifier: Apache-2.0
"""A cache of experts in plain Python: least recently used, served in waves."""

from dataclasses import dataclass, field


@dataclass
class ExpertCache:
    """See `kernels.xpu_dsv4.expert_cache.ExpertCache`.

    Attributes:
        experts: E, all of them in host memory.
        slots: the expert of each slot, or -1; S of them.
        used: the wave in which each slot was last used.
        wave: waves so far.
        hits: experts that a step needed and that had a slot.
        misses: experts that were read from host memory.

    """

    experts: int
    slots: list[int]
    used: list[int] = field(init=False)
    wave: int = 0
    hits: int = 0
    misses: int = 0

    def __post_init__(self) -> None:
        self.used = [0] * len(self.slots)

    def step(self, ids: list[int]) -> list[dict[int, int]]:
        """Serve a step; the slot of each expert, wave by wave, as long as one waits."""
        needed = sorted({expert for expert in ids if 0 <= expert < self.experts})
        here = {e: self.slots.index(e) for e in needed if e in self.slots}
        missing = [expert for expert in needed if expert not in here]
        self.hits += len(here)
        waves = []
        while here or missing:
            self.wave += 1
            for slot in here.values():
                self.used[slot] = self.wave
            while missing and len(here) < len(self.slots):
                free = [s for s in range(len(self.slots)) if s not in here.values()]
                slot = min(free, key=lambda s: self.used[s])
                expert = missing.pop(0)
                self.slots[slot], self.used[slot] = expert, self.wave
                here[expert] = slot
                self.misses += 1
            waves.append(here)
            here = {}
        return waves
