# SPDX-License-Identifier: Apache-2.0
"""The runtime that a wheel needs: torch, Triton and vllm-xpu-kernels in exact versions,
and what the base's own XPU Dockerfile installs.

That file is the only place where a release says which oneCCL, SYCL runtime, compiler
runtime, OpenMP and PTI belong to its torch. A build reads it and the base's
requirements; this repository repeats none of their versions and addresses. Hashes are
those that an index announces.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import (
    InvalidWheelFilename,
    canonicalize_name,
    parse_wheel_filename,
)
from packaging.version import Version

from stack.base.dockerfile import (
    DOCKERFILE,
    REQUIREMENTS,
    Stage,
    requirements,
    stages,
)
from stack.base.index import Index
from stack.base.releases import Release
from stack.base.store import Store
from stack.core.errors import EnvironmentProblem, SourceError
from stack.core.repository import NoSuchPath
from stack.release.resource import PinnedDistribution, Resource
from stack.series.tree import BaseTree

BASE_STAGE = "vllm-base"
SERVER_STAGE = "vllm-openai"
PUBLISHING = ".buildkite/scripts/publish-release-images.sh"
"""The base's script that publishes its images; it has the official image's name."""

_LOCAL = "+xpu"
"""torch's XPU build, as the XPU index calls it."""
_PINNED_ELSEWHERE = ("torch", "triton", "triton-xpu", "vllm-xpu-kernels")
_TARGET = {
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "sys_platform": "linux",
    "os_name": "posix",
}
_IMAGE = re.compile(r"[\w./:@-]+")
_ARGUMENT = re.compile(r"^ARG (\w+)=[\"']?([^\"'\n]*)[\"']?$", re.MULTILINE)
_EXTRA_INDEX = re.compile(r"--extra-index-url[ =](\S+)")
# The driver's packages; the same stage may download tools beside it.
_DRIVER = re.compile(
    r"\bwget\s+(\S+/(?:intel-|libigdgmm|libze|level-zero)[^/\s]*\.deb)\b"
)
_INSTALLER = re.compile(r"\bwget\s+[\"']?([^\s\"']+/[^\s\"'/]*oneccl[^\s\"'/]*\.sh)\b")
_CCL_LINK = re.compile(r"\bln -s (/[\w./-]+/ccl/[\w.-]+) /[\w./-]+/ccl/latest\b")
_KEY = re.compile(r"\bwget -O- (\S+) \| gpg --dearmor")
_SOURCE = re.compile(r"\bdeb \[[^\]]*\] (\S+) all main\b")
_PIN = re.compile(r"'Pin: version ([\w.*]+)'")
_ONEAPI_PACKAGE = re.compile(r"(?<=\s)intel-oneapi-[a-z][\w-]*-\d{4}\.\d+(?=\s)")
_LIBRARY_PATH = re.compile(r"^ENV LD_LIBRARY_PATH=[\"']?([^\"'\n]*)", re.MULTILINE)
_PIP = re.compile(r"\bpip (install|uninstall) ((?:(?!&&|\|\||;;).)*)")
_EXACT = re.compile(r"\"([^\"]+==[^\"]+)\"|'([^']+==[^']+)'|(?<!\S)([\w.-]+==[\w.+!]+)")
_OFFICIAL = re.compile(
    r"\bmanifest push \"?([\w./-]+-xpu):v\$\{RELEASE_VERSION\}(?![\w-])"
)

RUNTIME = "runtime"
"""The kind of a resource that the base names for running the wheel."""


@dataclass(frozen=True)
class OneApi:
    """Packages of Intel's own repository for Debian and Ubuntu; empty for none.

    Attributes:
        key, source: the addresses of its key and of the repository.
        pin: the versions that may be installed, such as `2025.3*`; empty for any.
        packages: the names to install.
    """

    key: str = ""
    source: str = ""
    pin: str = ""
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Runtime:
    """What the base's own files say about the runtime.

    Attributes:
        pins: torch, Triton and the kernels, without hashes until these are asked for.
        image: the image that its Dockerfile starts from.
        python: the Python of its image, such as `3.12`.
        drivers: the addresses of the user-mode driver's packages.
        indexes: the package indexes besides the default one.
        packages: the exact distributions that it installs over what torch brought.
        removed: the distributions of torch's that it uninstalls.
        installer: the address of a oneCCL to install in their place, empty if torch's
            or that of `packages` stays; `ccl` is the folder that it installs into.
        oneapi: what it installs from Intel's repository.
        library_path: where it has the loader look for libraries.
        official: the image that upstream publishes of this release, empty before
            there was any.
        file: the Dockerfile.
    """

    pins: tuple[PinnedDistribution, ...]
    image: str
    python: str
    drivers: tuple[str, ...]
    indexes: tuple[str, ...]
    packages: tuple[PinnedDistribution, ...]
    removed: tuple[str, ...]
    installer: str
    ccl: str
    oneapi: OneApi
    library_path: tuple[str, ...]
    official: str
    file: str = DOCKERFILE


def runtime(needs: str, dockerfile: str, publishing: str, release: Release) -> Runtime:
    """Read the base's XPU requirements, its XPU Dockerfile and its script that
    publishes images (empty if it has none).

    Raises:
        SourceError: the Dockerfile has no stage `vllm-base`, or the stage no image.
    """
    found = stages(dockerfile)
    base = found.get(BASE_STAGE)
    if base is None or not _IMAGE.fullmatch(base.image):
        raise SourceError(
            f"the base's Dockerfile has no stage {BASE_STAGE} to take the image from",
            release=release.name,
            path=DOCKERFILE,
            hint=f"xpustack apply {release.name} --to DIR",
        )
    server = found.get(SERVER_STAGE, Stage(base.image, ""))
    arguments = dict(_ARGUMENT.findall(base.text))
    text = _substituted(base.text, arguments)
    lines = (line for line in needs.splitlines() if not line.startswith("#"))
    ccl = _first(_CCL_LINK, text)
    official = _first(_OFFICIAL, publishing)
    return Runtime(
        pins=tuple(_pins(release, needs)),
        image=base.image,
        python=arguments.get("PYTHON_VERSION", ""),
        drivers=tuple(dict.fromkeys(_DRIVER.findall(text))),
        indexes=tuple(
            dict.fromkeys(
                match[1].rstrip("/")
                for line in lines
                if (match := _EXTRA_INDEX.search(line))
            )
        ),
        packages=tuple(_packages(server.text)),
        removed=tuple(_removed(server.text)),
        installer=_first(_INSTALLER, text),
        ccl=ccl,
        oneapi=_oneapi(text),
        library_path=_library_path(base.text, ccl),
        official=official and f"{official}:{release.name}",
    )


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
        _base_file(store, base, REQUIREMENTS),
        _base_file(store, base, DOCKERFILE),
        publishing,
        base.release,
    )


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


def resources(runtime: Runtime) -> list[Resource]:
    """Each part of the runtime by name and address. It takes no part in the build, and
    no digest of it is known."""
    parts = [("image", f"pkg:docker/{_docker(runtime.image)}")]
    if runtime.official:
        parts.append(("official image", f"pkg:docker/{_docker(runtime.official)}"))
    if runtime.python:
        parts.append(("python", f"pkg:generic/python@{runtime.python}"))
    parts += [(_file_name(url), url) for url in runtime.drivers]
    if runtime.installer:
        parts.append((_file_name(runtime.installer), runtime.installer))
    oneapi, pin = runtime.oneapi, runtime.oneapi.pin and f"@{runtime.oneapi.pin}"
    parts += [
        (name, f"pkg:deb/{name}{pin}?repository_url={oneapi.source}")
        for name in oneapi.packages
    ]
    parts += [
        (pin.name, f"pkg:pypi/{canonicalize_name(pin.name)}@{pin.version}")
        for pin in (*runtime.pins, *runtime.packages)
    ]
    return [Resource(name, uri, annotations={"kind": RUNTIME}) for name, uri in parts]


def _base_file(store: Store, base: BaseTree, path: str) -> str:
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


def _pins(release: Release, text: str) -> Iterator[PinnedDistribution]:
    """torch, Triton and vllm-xpu-kernels of a release, without hashes.

    torch is always the XPU build, which the XPU index calls `<version>+xpu`. Some
    bases say only `<version>`, which any build satisfies.
    """
    torch, triton, kernels = release.torch, release.triton, release.xpu_kernels
    local = "" if "+" in torch.version else _LOCAL
    yield PinnedDistribution("torch", torch.version + local, torch.file)
    yield PinnedDistribution(triton.name or "triton", triton.version, triton.file)
    name, named = "vllm-xpu-kernels", requirements(text)
    url = next((one.url for one in named if canonicalize_name(one.name) == name), None)
    yield PinnedDistribution(name, kernels.version, kernels.file, url=url)


def _packages(server: str) -> Iterator[PinnedDistribution]:
    seen = set()
    for command, words in _PIP.findall(server):
        if command != "install":
            continue
        for match in _EXACT.finditer(words):
            try:
                requirement = Requirement(match[1] or match[2] or match[3])
            except InvalidRequirement:
                continue
            name = canonicalize_name(requirement.name)
            marker = requirement.marker
            if name in _PINNED_ELSEWHERE or name in seen:
                continue
            if marker is not None and not marker.evaluate(dict(_TARGET)):
                continue
            seen.add(name)
            [specifier] = requirement.specifier
            yield PinnedDistribution(requirement.name, specifier.version, DOCKERFILE)


def _removed(server: str) -> Iterator[str]:
    for command, words in _PIP.findall(server):
        if command == "uninstall":
            for name in words.split():
                if not name.startswith("-") and name not in _PINNED_ELSEWHERE:
                    yield name


def _oneapi(text: str) -> OneApi:
    key, source, pin = (_first(what, text) for what in (_KEY, _SOURCE, _PIN))
    packages = tuple(dict.fromkeys(_ONEAPI_PACKAGE.findall(text)))
    named = key and source and packages
    return OneApi(key, source, pin, packages) if named else OneApi()


def _library_path(base: str, ccl: str) -> tuple[str, ...]:
    """The base's own path; where that leaves it to a shell's profile, the folder of
    the oneCCL that it installs. A server is started without a profile."""
    values = _LIBRARY_PATH.findall(base)
    places = values[-1].split(":") if values else []
    literal = tuple(place for place in places if place and "$" not in place)
    if ccl and not any(place.startswith(ccl) for place in literal):
        return (f"{ccl}/lib", *literal)
    return literal


def _substituted(text: str, arguments: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda name: arguments.get(name[1], name[0]), text)


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""


def _file_name(url: str) -> str:
    return url.rpartition("/")[2]


def _docker(image: str) -> str:
    name, _, tag = image.rpartition(":")
    return f"{name}@{tag}" if name else f"{tag}@latest"


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
