# SPDX-License-Identifier: Apache-2.0
"""How a file of a wheel, or one beside it, differs from what a checkout makes."""

from dataclasses import dataclass

from xpustack.release.resource import sha256_of


@dataclass(frozen=True)
class Difference:
    """A file that differs from what this checkout makes: its name in the wheel, beside
    it or in this repository, the problem, and further lines."""

    file: str
    problem: str
    detail: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n    ".join([f"{self.file}: {self.problem}", *self.detail])


def merge_by_path(differences: list[Difference]) -> tuple[Difference, ...]:
    """One difference per file: its first problem, with the others as further lines."""
    by_path: dict[str, Difference] = {}
    for difference in differences:
        path = difference.file
        first = by_path.get(path)
        if first is None:
            by_path[path] = difference
        elif difference.problem != first.problem:
            lines = (*first.detail, difference.problem, *difference.detail)
            by_path[path] = Difference(path, first.problem, lines)
    return tuple(by_path.values())


def first_difference(actual: bytes, expected: bytes) -> tuple[str, ...]:
    """The first line in which two contents differ, else their hashes."""
    try:
        ours, theirs = expected.decode().splitlines(), actual.decode().splitlines()
    except UnicodeDecodeError:
        ours = theirs = []
    for number, (left, right) in enumerate(zip(ours, theirs, strict=False), start=1):
        if left != right:
            return (
                f"line {number} as made here: {left[:160]}",
                f"line {number} as it is:     {right[:160]}",
            )
    return hash_lines(sha256_of(expected), sha256_of(actual))


def hash_lines(expected: str, actual: str) -> tuple[str, ...]:
    """Two hashes that ought to be one, a line each."""
    return (f"expected sha256 {expected}", f"actual sha256   {actual}")
