# SPDX-License-Identifier: Apache-2.0
"""The runtime that a base names: image, driver, oneCCL, compiler runtime, libraries."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from made import ONEAPI, read, text
from tiny_stack import DOCKERFILE, PUBLISHING

from stack.base.download import base_of
from stack.base.pin import DOCKERFILE as DOCKERFILE_PATH
from stack.base.pin import REQUIREMENTS
from stack.base.releases import Release, load
from stack.base.store import Store
from stack.core.cache import Cache
from stack.core.errors import SourceError
from stack.core.project import Project
from stack.release import runtime
from stack.release.runtime import PUBLISHING as PUBLISHING_PATH
from stack.release.runtime import OneApi, Runtime
from stack.release.ship import CONSTRAINTS, IMAGE, RUNTIME


def test_it_is_read_from_the_stages_of_the_server_alone(release: Release):
    here = read(DOCKERFILE, release, PUBLISHING)
    assert here.image == "example/gpu-runtime:2"
    names = [url.rpartition("/")[2] for url in here.drivers]
    assert names == ["libze-gpu.deb", "level-zero_1.deb"]
    assert here.indexes == ("https://wheels.example.org/xpu",)
    assert here.python == "3.12"
    assert [package.requirement for package in here.packages] == [
        "intel-sycl-rt==7.1",
        "oneccl==8.2",
    ]
    assert here.removed == ("oneccl",)
    assert here.library_path == ("/opt/venv/lib", "/usr/local/lib")
    assert (here.installer, here.ccl, here.oneapi) == ("", "", OneApi())
    assert here.official == f"example/vllm-openai-xpu:{release.name}"


def test_a_oneccl_of_its_own_is_read_with_the_packages_that_it_needs(release: Release):
    here = read(ONEAPI, release)
    assert here.installer == "https://example.org/9.1/intel-oneccl-9.1_offline.sh"
    assert here.ccl == "/opt/intel/oneapi/ccl/9.1"
    assert here.oneapi == OneApi(
        "https://example.org/signer.PUB",
        "https://example.org/oneapi",
        "2025.3*",
        ("intel-oneapi-compiler-dpcpp-cpp-2025.3", "intel-oneapi-mkl-devel-2025.3"),
    )
    # The path names the image's own, so a server needs the folder said to it.
    assert here.library_path == ("/opt/intel/oneapi/ccl/9.1/lib", "/usr/local/lib/")
    assert here.official == ""


def test_packages_without_a_pinned_version_are_read_too(release: Release):
    unpinned = ONEAPI.replace("'Pin: version 2025.3*' ", "")
    assert unpinned != ONEAPI
    here = read(unpinned, release)
    assert here.oneapi.pin == ""
    said = text(CONSTRAINTS, release, here)
    assert "intel-oneapi-mkl-devel-2025.3\n" in said


def test_a_package_for_another_machine_is_not_taken(release: Release):
    other = DOCKERFILE.replace("== 'x86_64'", "== 'aarch64'")
    packages = read(other, release).packages
    assert [package.name for package in packages] == ["intel-sycl-rt"]


def test_constraints_and_provenance_carry_it(release: Release):
    here = read(ONEAPI, release)
    said = text(CONSTRAINTS, release, here)
    assert "# oneCCL: https://example.org/9.1/intel-oneccl-9.1_offline.sh\n" in said
    assert "# Python 3.12\n" in said
    resources = {part.name: part.uri for part in runtime.resources(here)}
    assert resources["intel-oneccl-9.1_offline.sh"].startswith("https://example.org/")
    assert resources["torch"] == "pkg:pypi/torch@2.11.0+xpu"
    here = read(DOCKERFILE, release)
    said = text(CONSTRAINTS, release, here)
    assert "# runtime.txt, over torch's own: oneccl==8.2\n" in said
    assert "# uninstalled: oneccl\n" in said
    assert text(RUNTIME, release, here).endswith("\noneccl==8.2\n")


@pytest.mark.parametrize(
    "dockerfile",
    [
        "FROM x:1\n",
        "# FROM x:1 AS vllm-base\n",
        "ARG IMAGE\nFROM ${IMAGE} AS vllm-base\n",
        "ARG IMAGE=x:1\nFROM ${IMAGE:-y} AS vllm-base\n",
    ],
)
def test_a_base_without_that_stage_or_its_image_is_refused(
    release: Release, dockerfile: str
):
    with pytest.raises(SourceError, match="no stage vllm-base"):
        read(dockerfile, release)


@dataclass(frozen=True)
class Pinned:
    """A pinned release: its runtime as we read it, and the files that we read."""

    release: Release
    runtime: Runtime
    requirements: str
    dockerfile: str


@pytest.fixture(scope="session")
def runtimes(real_project: Project, real_cache: Cache) -> dict[str, Pinned]:
    """Each pinned release by name."""
    found, store = {}, Store(real_cache)
    for release in load(real_project):
        tree = base_of(store, release).tree
        files = store.git.files(tree, (REQUIREMENTS, DOCKERFILE_PATH, PUBLISHING_PATH))
        texts = {path: store.git.file(tree, path).decode() for path in files}
        requirements = texts[REQUIREMENTS]
        here = runtime.runtime(
            requirements,
            texts[DOCKERFILE_PATH],
            texts.get(PUBLISHING_PATH, ""),
            release,
        )
        texts_read = (requirements, texts[DOCKERFILE_PATH])
        found[release.name] = Pinned(release, here, *texts_read)
    return found


# What a person finds in a Dockerfile: no stage, no command and no marker is understood.
NAMED = re.compile(
    r"\b((?:oneccl|intel-|dpcpp|mkl|onemkl|tbb|umf|tcmlib|impi)[a-z-]*)==([\w.]+)"
)
CCL_RELEASE = re.compile(r"intel-oneccl-([\d.]+)_offline\.sh")


def pinned_names() -> tuple[str, ...]:
    return load(Project.find(Path(__file__).parent)).names


@pytest.mark.parametrize("name", pinned_names())
def test_each_pinned_release_names_all_of_it(name: str, runtimes: dict[str, Pinned]):
    release, here = runtimes[name].release, runtimes[name].runtime
    assert "vllm-base" not in here.image
    names = " ".join(url.rpartition("/")[2] for url in here.drivers)
    assert "libze-intel-gpu1" in names and "intel-igc-core" in names
    assert "xpu-smi" not in names
    assert here.indexes
    said = text(CONSTRAINTS, release, here)
    assert f"\ntorch=={release.torch.version.partition('+')[0]}+xpu\n" in said
    assert here.pins[2].url is None or release.xpu_kernels.version in here.pins[2].url
    assert here.python == "3.12"
    assert here.library_path and all(part[0] == "/" for part in here.library_path)
    # oneCCL comes from exactly one place: an installer, in whose favour torch's own
    # goes, the list of packages, or torch.
    assert bool(here.installer) == ("oneccl" in here.removed)
    if here.installer:
        assert not here.packages
        assert here.oneapi.packages and "$" not in here.installer
        assert here.ccl and here.library_path[0] == f"{here.ccl}/lib"
        assert f"# oneCCL: {here.installer}" in said
    listed = {package.name: package.version for package in here.packages}
    if listed:
        assert {
            "oneccl",
            "intel-sycl-rt",
            "intel-cmplr-lib-rt",
            "intel-openmp",
            "intel-pti",
        } <= set(listed)
        assert all(f"{key}=={value}" in said for key, value in listed.items())
    resources = {part.name: part.uri for part in runtime.resources(here)}
    for key, value in listed.items():
        assert resources[key] == f"pkg:pypi/{key}@{value}"
    for url in (*here.drivers, *([here.installer] if here.installer else [])):
        assert resources[url.rpartition("/")[2]] == url
    for package in here.oneapi.packages:
        assert resources[package].startswith(f"pkg:deb/{package}")
    assert resources["python"] == "pkg:generic/python@3.12"
    assert here.image.rpartition(":")[2] in resources["image"]
    image = text(IMAGE, release, here)
    assert f"FROM {here.image}\n" in image
    assert all(url in image for url in (*here.drivers, here.installer))


@pytest.mark.parametrize("name", pinned_names())
def test_nothing_that_a_dockerfile_pins_is_overlooked(
    name: str, runtimes: dict[str, Pinned]
):
    """A release from which nothing is recognised has a Dockerfile without any pin."""
    pinned = runtimes[name]
    stages = re.split(r"^FROM (?=\S+ AS )", pinned.dockerfile, flags=re.MULTILINE)
    [server] = [text for text in stages if text.split()[2:3] == ["vllm-openai"]]
    listed = {package.name: package.version for package in pinned.runtime.packages}
    assert dict(NAMED.findall(server)) == listed
    assert dict(NAMED.findall(pinned.dockerfile)) == listed
    installers = set(CCL_RELEASE.findall(pinned.dockerfile))
    pinned_by_name = re.findall(r'ONECCL_INSTALLER="?intel-oneccl', pinned.dockerfile)
    assert bool(installers) == bool(pinned_by_name)
    read = CCL_RELEASE.findall(pinned.runtime.installer)
    assert set(read) == installers


def test_the_oneccl_of_each_release(runtimes: dict[str, Pinned]):
    """docs/deploying.md says these: a oneCCL of its own, and 2022.1.2."""
    found = {}
    for name, pinned in runtimes.items():
        own = CCL_RELEASE.findall(pinned.runtime.installer)
        listed = {part.name: part.version for part in pinned.runtime.packages}
        torch = pinned.release.torch.version.partition("+")[0]
        found[name] = own[0] if own else listed.get("oneccl", f"torch {torch}'s")
    names = list(found)
    newer = names.index("v0.31.0")
    assert {found[name] for name in names[:newer]} == {"2021.15.9.14"}
    assert {found[name] for name in names[newer:]} == {"2022.1.2"}


def test_there_are_official_images_from_v0_26_0_on(runtimes: dict[str, Pinned]):
    has = [name for name, one in runtimes.items() if one.runtime.official]
    names = list(runtimes)
    assert has == names[names.index("v0.26.0") :]
    for name in has:
        assert runtimes[name].runtime.official.endswith(f":{name}")
        parts = runtime.resources(runtimes[name].runtime)
        uris = [part.uri for part in parts if part.name == "official image"]
        assert [uri.endswith(f"@{name}") for uri in uris] == [True]
