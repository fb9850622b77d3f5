# SPDX-License-Identifier: Apache-2.0
"""The exact versions of torch, Triton and vllm-xpu-kernels to install with a wheel,
with the hashes that an index announces and the places that the base names.

A build reads addresses from the base's own requirements and Dockerfile; this
repository names none.
"""

from collections.abc import Iterable
from dataclasses import replace

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import (
    InvalidWheelFilename,
    canonicalize_name,
    parse_wheel_filename,
)
from packaging.version import Version

from xpustack.base.dockerfile import DOCKERFILE, REQUIREMENTS
from xpustack.base.index import Index
from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.core.errors import EnvironmentProblem, SourceError
from xpustack.core.repository import NoSuchPath
from xpustack.release.resource import PinnedDistribution
from xpustack.release.runtime import PUBLISHING, Runtime, runtime
from xpustack.series.tree import BaseTree

_LOCAL = "+xpu"


def pinned_distributions(
    release: Release, requirements: str
) -> list[PinnedDistribution]:
    """torch, Triton and vllm-xpu-kernels of a release, without hashes.

    torch is always the XPU build, which the XPU index calls `<version>+xpu`. Some
    bases say only `<version>`, which any build satisfies.

    Args:
        requirements: the text of the base's `requirements/xpu.txt`.
    """
    torch, triton, kernels = release.torch, release.triton, release.xpu_kernels
    version = torch.version
    return [
        PinnedDistribution(
            "torch", version if "+" in version else version + _LOCAL, torch.file
        ),
        PinnedDistribution(triton.name or "triton", triton.version, triton.file),
        PinnedDistribution(
            "vllm-xpu-kernels",
            kernels.version,
            kernels.file,
            url=_direct_url(requirements, "vllm-xpu-kernels"),
        ),
    ]


def with_hashes(
    pins: Iterable[PinnedDistribution], index: Index
) -> list[PinnedDistribution]:
    """The same distributions with the hashes that pip's indexes announce.

    Raises:
        EnvironmentProblem: an index cannot be reached.
    """
    hashed_pins = []
    for pin in pins:
        try:
            packages = index.packages(pin.requirement)
        except EnvironmentProblem as error:
            error.hint = f"{error.hint}, or the same command with --offline"
            raise
        hashes = {
            value
            for package in packages
            if _fits(package.link.filename, pin.version)
            for value in (package.link.hash_option or {}).get("sha256", [])
        }
        hashed_pins.append(replace(pin, hashes=tuple(sorted(hashes))))
    return hashed_pins


def base_file(store: Store, base: BaseTree, path: str) -> str:
    """The text of a file of the base.

    Raises:
        SourceError: the base has no such file.
    """
    try:
        return store.git.file(base.tree_id, path).decode()
    except NoSuchPath as error:
        name = base.release.name
        raise SourceError(
            f"the base has no {path}",
            release=name,
            detail=error.stderr,
            hint=f"xpustack apply {name} --upto base --to DIR, and look for it there",
        ) from None


def base_runtime(store: Store, base: BaseTree) -> Runtime:
    """The runtime that the base's own files describe.

    Raises:
        SourceError: the base lacks its XPU requirements or Dockerfile, or they lack
            what every base has.
    """
    try:
        publishing = store.git.file(base.tree_id, PUBLISHING).decode()
    except NoSuchPath:
        publishing = ""
    return runtime(
        base_file(store, base, REQUIREMENTS),
        base_file(store, base, DOCKERFILE),
        publishing,
        base.release,
    )


def _direct_url(requirements: str, name: str) -> str | None:
    for line in requirements.splitlines():
        try:
            requirement = Requirement(line.partition(" #")[0].strip())
        except InvalidRequirement:
            continue
        if canonicalize_name(requirement.name) == name:
            return requirement.url
    return None


def _fits(filename: str, version: str) -> bool:
    """Whether a file is a wheel of exactly this version for Linux on x86-64. A version
    without a local part does not match one that has it."""
    try:
        _, actual, _, tags = parse_wheel_filename(filename)
    except InvalidWheelFilename:
        return False
    return actual == Version(version) and any(
        tag.platform == "any"
        or ("linux" in tag.platform and tag.platform.endswith("x86_64"))
        for tag in tags
    )
