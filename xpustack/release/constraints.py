# SPDX-License-Identifier: Apache-2.0
"""The exact versions of torch, Triton and vllm-xpu-kernels to install with a wheel,
with the hashes that an index announces and the places that the base names.

A build reads addresses from the base's own requirements and Dockerfile; this
repository names none.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import httpx2
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import (
    InvalidWheelFilename,
    canonicalize_name,
    parse_wheel_filename,
)
from packaging.version import Version
from unearth import Link

from xpustack.base.dockerfile import stages
from xpustack.base.index import Index
from xpustack.base.pin import DOCKERFILE, REQUIREMENTS
from xpustack.base.releases import Release
from xpustack.base.store import Store
from xpustack.core.errors import EnvironmentProblem, SourceError
from xpustack.core.repository import NoSuchPath
from xpustack.series.tree import BaseTree

_LOCAL = "+xpu"
_EXTRA_INDEX = re.compile(r"--extra-index-url[ =](\S+)")
_RUNTIME = "vllm-base"
_IMAGE = re.compile(r"[\w./:@-]+")
# The driver's packages; the same stage may download tools beside it.
_DRIVER = re.compile(
    r"\bwget\s+(\S+/(?:intel-|libigdgmm|libze|level-zero)[^/\s]*\.deb)\b"
)


@dataclass(frozen=True)
class PinnedDistribution:
    """A distribution in exactly one version.

    `file` is the base's file that names it; `hashes` are the sorted sha256 of its
    wheels for Linux on x86-64, empty if no index announces any; `url` is its direct
    address, None if it comes from an index.
    """

    name: str
    version: str
    file: str
    hashes: tuple[str, ...] = ()
    url: str | None = None

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class Runtime:
    """The runtime that the base's own files describe: the image it starts from, the
    driver's packages, the indexes besides the default one."""

    image: str
    drivers: tuple[str, ...]
    indexes: tuple[str, ...]


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
            packages = list(
                index.finder.find_matches(
                    pin.requirement, allow_yanked=True, allow_prereleases=True
                )
            )
        except httpx2.HTTPError as error:
            raise EnvironmentProblem(
                f"cannot ask the package index for {pin.name}",
                detail=str(error),
                hint="python -m pip config list, or the same command with --offline",
            ) from error
        hashes = {
            value
            for package in packages
            if _fits(package.link.filename, pin.version)
            for value in _sha256_hashes(package.link)
        }
        hashed_pins.append(replace(pin, hashes=tuple(sorted(hashes))))
    return hashed_pins


def constraints(
    release: Release, version: str, pins: Iterable[PinnedDistribution]
) -> str:
    """The text of `constraints.txt`, for `pip install -c`."""
    lines = [
        f"# What vllm {version} runs with, as vLLM {release.version} names it.",
        "# pip obeys hashes only where it has one for everything that it installs:",
        "# they stand in pins.txt, to be installed first.",
    ]
    for pin in pins:
        lines += [f"# {pin.file}", pin.requirement]
    return "\n".join(lines) + "\n"


def pins_with_hashes(pins: Iterable[PinnedDistribution]) -> str:
    """The text of `pins.txt`, for `pip install --no-deps --require-hashes -r`. Pins
    without announced hashes become comments."""
    lines = ["# pip install --no-deps --require-hashes -r pins.txt"]
    for pin in pins:
        if pin.hashes:
            lines.append(" \\\n    ".join([pin.requirement, *_options(pin)]))
        else:
            lines.append(f"# no index announces a hash: {pin.requirement}")
    return "\n".join(lines) + "\n"


def runtime(requirements: str, dockerfile: str, release: Release) -> Runtime:
    """Read the base's XPU requirements and Dockerfile.

    Raises:
        SourceError: the Dockerfile has no stage `vllm-base`, or the stage no image.
    """
    stage = stages(dockerfile).get(_RUNTIME)
    if stage is None or not _IMAGE.fullmatch(stage.image):
        raise SourceError(
            f"the base's Dockerfile has no stage {_RUNTIME} to take the image from",
            release=release.name,
            path=DOCKERFILE,
            hint=f"xpustack apply {release.name} --to DIR",
        )
    lines = (line for line in requirements.splitlines() if not line.startswith("#"))
    return Runtime(
        image=stage.image,
        drivers=tuple(dict.fromkeys(_DRIVER.findall(stage.text))),
        indexes=tuple(
            dict.fromkeys(
                match[1].rstrip("/")
                for line in lines
                if (match := _EXTRA_INDEX.search(line))
            )
        ),
    )


def build_arguments(
    wheel: str, pins: Iterable[PinnedDistribution], runtime: Runtime
) -> str:
    """The text of `container.args`: the build arguments of `deploy/Containerfile`."""
    triton = next(pin for pin in pins if pin.name.startswith("triton"))
    arguments = {
        "BASE_IMAGE": runtime.image,
        "DRIVER_URLS": ",".join(runtime.drivers),
        "INDEX_URLS": ",".join(runtime.indexes),
        "TRITON": triton.requirement,
        "WHEEL": wheel,
    }
    return "".join(f"{name}={value}\n" for name, value in arguments.items())


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


def base_texts(store: Store, base: BaseTree) -> tuple[str, str]:
    """The base's XPU requirements and its XPU Dockerfile.

    Raises:
        SourceError: the base lacks one of them.
    """
    return base_file(store, base, REQUIREMENTS), base_file(store, base, DOCKERFILE)


def _options(pin: PinnedDistribution) -> list[str]:
    return [f"--hash=sha256:{value}" for value in pin.hashes]


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


def _sha256_hashes(link: Link) -> list[str]:
    options: Mapping[str, list[str]] = link.hash_option or {}
    return options.get("sha256", [])
