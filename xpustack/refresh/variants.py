# SPDX-License-Identifier: Apache-2.0
"""A step carried in its own form or, where that conflicts, in the form that it has on
another release: a conflict that is solved already, reviewed and tested."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from packaging.version import Version

from xpustack.base import releases
from xpustack.core.project import Project
from xpustack.refresh.carry import CarriedStep, Carrier
from xpustack.series.order import read_patches
from xpustack.series.overlay import needed_kernels, overlay_files
from xpustack.series.patch import load_step
from xpustack.series.tree import Step, StepTree


def carry_step(
    project: Project,
    carry: Carrier,
    source: StepTree,
    onto: str,
    *,
    variants: bool = True,
) -> CarriedStep:
    """Carry a step, with the kernels that it needs, onto the commit `onto`.

    Args:
        variants: where it conflicts, try its other forms, the newest first.
    """
    carried = carry.carry(source, onto)
    if carried.verdict == "upstream":
        return carried
    if carried.tree is not None:
        tree = carry.with_files(carried.tree, needed_kernels(project, source.step))
        return replace(carried, tree=tree)
    for step in _variants(project, source.step) if variants else ():
        files = {
            path: file.content for path, file in overlay_files(project, step).items()
        }
        files |= needed_kernels(project, step)
        if (fitting := carry.fits(step, files, onto)) is not None:
            text = f"the patch of {step.path.stem} fits as it is"
            return CarriedStep("variant", fitting, step, text, files=carried.files)
    return carried


def _variants(project: Project, step: Step) -> Iterator[Step]:
    """The other forms of a step, the newest first."""
    users: dict[Path, str] = {}
    for name in releases.load(project).names:
        path = read_patches(project, name).get(step.slug)
        if path is not None and path != step.path:
            users[path] = name
    for path in sorted(users, key=lambda path: Version(path.stem), reverse=True):
        yield load_step(users[path], path)
