# SPDX-License-Identifier: Apache-2.0
"""A wheel's bill of materials in CycloneDX 1.6 JSON.

The wheel is the main component. Its pedigree names the base as ancestor and every
patch; the files of this repository that went into it are components with their
hashes. It carries no time, so that equal wheels have equal bills.

This module does not use cyclonedx-python-lib, which sorts a pedigree's patches and
adds a time.
"""

import json
import uuid
from collections.abc import Iterable, Sequence

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stack.core.history import TOOL
from stack.release.inputs import WheelBuild
from stack.release.resource import PinnedDistribution, Resource

SPECIFICATION = "1.6"
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_OID, "xpustack sbom")
_MAIN = "wheel"


def sbom(build: WheelBuild) -> str:
    """The bill as JSON text."""
    release, tip = build.release, build.tip
    files = [_file(part) for part in build.parts if part.kind not in ("base", "series")]
    requirements = _requirements(
        build.wheel.metadata.get("requires_dist", []),
        [*build.runtime.pins, *build.runtime.packages],
    )
    bill = {
        "$schema": f"http://cyclonedx.org/schema/bom-{SPECIFICATION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, build.digest)}",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": TOOL}]},
            "component": {
                **_vllm(_MAIN, build.version, build.name, build.digest),
                "pedigree": {
                    "ancestors": [
                        _vllm("base", release.version, release.sdist, release.sha256)
                    ],
                    "commits": [
                        {
                            "uid": tip.commit,
                            "message": f"{release.name} {tip.label}:"
                            f" tree {tip.tree_id}",
                        }
                    ],
                    "patches": _patches(build),
                    "notes": "The patches apply to the ancestor in this order."
                    " The fragment of a patch's address is its sha256.",
                },
                "properties": [{"name": "xpustack:tree", "value": tip.tree_id}],
            },
        },
        "components": [*files, *requirements],
        "dependencies": [
            {
                "ref": _MAIN,
                "dependsOn": sorted(
                    str(component["bom-ref"]) for component in requirements
                ),
            }
        ],
    }
    return json.dumps(bill, indent=1) + "\n"


def _vllm(ref: str, version: str, file: str, sha256: str) -> dict[str, object]:
    """vLLM in a version: the wheel, or the base."""
    return {
        **_library(ref, "vllm", version, file),
        "hashes": [_sha256(sha256)],
        "licenses": [{"license": {"id": "Apache-2.0"}}],
    }


def _patches(build: WheelBuild) -> list[dict[str, object]]:
    """The patches in CycloneDX's terms: `backport` if upstream has the change,
    `unofficial` if it does not."""
    landed = {
        step.slug
        for step in build.steps
        if step.trailers.upstream_status.startswith("Backport")
    }
    return [
        {
            "type": "backport" if part.step in landed else "unofficial",
            "diff": {"url": f"{part.name}#sha256={part.sha256}"},
        }
        for part in build.parts
        if part.kind == "patch"
    ]


def _file(part: Resource) -> dict[str, object]:
    properties = [
        {"name": f"xpustack:{name}", "value": value}
        for name, value in part.annotations.items()
    ]
    return {
        "type": "file",
        "bom-ref": f"file:{part.step}:{part.name}",
        "name": part.name,
        "hashes": [_sha256(part.sha256)],
        "properties": properties,
    }


def _requirements(
    requires: Iterable[str], pins: Sequence[PinnedDistribution]
) -> list[dict[str, object]]:
    """The pins and the runtime, then the wheel's other requirements by name, without
    those of extras."""
    components: dict[str, dict[str, object]] = {}
    for pin in pins:
        component = _library(f"pypi:{pin.name}", pin.name, pin.version)
        component["properties"] = [{"name": "xpustack:named-in", "value": pin.file}]
        if pin.hashes or pin.url:
            component["externalReferences"] = [
                {
                    "type": "distribution",
                    "url": pin.url or component["purl"],
                    "hashes": [_sha256(value) for value in pin.hashes],
                }
            ]
        components[pin.name] = component
    for line in sorted(requires, key=str.lower):
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if name in components or "extra" in str(requirement.marker or ""):
            continue
        components[name] = _library(f"pypi:{name}", name)
        components[name]["properties"] = [
            {"name": "xpustack:requirement", "value": line}
        ]
    return list(components.values())


def _sha256(value: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": value}


def _library(
    ref: str, name: str, version: str | None = None, file: str | None = None
) -> dict[str, object]:
    """A distribution of the index, in a version or in any."""
    # Most commands write no bill, so they need not import the library.
    from packageurl import PackageURL

    qualifiers = {"file_name": file} if file else None
    return {
        "type": "library",
        "bom-ref": ref,
        "name": name,
        **({"version": version} if version else {}),
        "purl": PackageURL("pypi", None, name, version, qualifiers).to_string(),
    }
