# SPDX-License-Identifier: Apache-2.0
"""Estimates how long checks take, and how much of a run is left."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean

import msgspec

from xpustack.checks.observer import Check
from xpustack.checks.results import Kind
from xpustack.core.cache import Cache


class _Stored(msgspec.Struct, frozen=True):
    """The part of a stored result that an estimate needs."""

    release: str
    step: str
    kind: Kind
    seconds: float


def past_seconds(cache: Cache) -> dict[Check, float]:
    """How long each check took when a result of it was stored last."""
    files: list[tuple[float, bytes]] = []
    for path in cache.results.glob("*/*.json"):
        try:
            files.append((path.stat().st_mtime, path.read_bytes()))
        except OSError:
            continue
    past: dict[Check, float] = {}
    for _, data in sorted(files, key=lambda file: file[0]):
        try:
            stored = msgspec.json.decode(data, type=_Stored)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        past[Check(stored.release, stored.step, stored.kind)] = stored.seconds
    return past


@dataclass
class Estimate:
    """The seconds that checks take.

    A check takes as long as in the `past`. One without a past takes the mean of the
    checks of its kind that this run finished, or else of its kind's past.
    """

    past: Mapping[Check, float] = field(default_factory=dict)
    _finished: dict[Kind, list[float]] = field(default_factory=dict)

    def add(self, check: Check, seconds: float) -> None:
        """Learn from a check that this run finished."""
        self._finished.setdefault(check.kind, []).append(seconds)

    def expect(self, check: Check) -> float | None:
        """The seconds of a check; None if nothing is known of its kind."""
        own = self.past.get(Check(check.release, check.step, check.kind))
        if own is not None:
            return own
        same_kind = self._finished.get(check.kind) or [
            seconds for other, seconds in self.past.items() if other.kind == check.kind
        ]
        return fmean(same_kind) if same_kind else None

    def time_left(
        self, unfinished: Iterable[tuple[Check, float]], jobs: int
    ) -> float | None:
        """Seconds until all are done, `jobs` at a time.

        Args:
            unfinished: each check and the seconds for which it has run already.

        Returns:
            None if nothing is known of any of their kinds. A check of an unknown kind
            counts as the mean of the others.
        """
        pairs = [(self.expect(check), ran) for check, ran in unfinished]
        known = [expected for expected, _ in pairs if expected is not None]
        if not known:
            return None
        mean = fmean(known)
        rest = [
            max((mean if expected is None else expected) - ran, 0.0)
            for expected, ran in pairs
        ]
        return max(sum(rest) / min(jobs, len(rest)), max(rest))


def in_words(seconds: float) -> str:
    """`45 s`, `3 min 10 s` or `1 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def about(seconds: float) -> str:
    """As `in_words`, rounded to what an estimate can know."""
    if seconds < 90:
        return f"{max(round(seconds / 10) * 10, 10)} s"
    if seconds < 3600:
        return f"{round(seconds / 60)} min"
    return in_words(seconds)
