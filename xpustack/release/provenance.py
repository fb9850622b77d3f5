# SPDX-License-Identifier: Apache-2.0
"""Where a wheel comes from: an in-toto Statement with a SLSA v1 provenance.

It names the base, every step, the tool and the programs of the machine, each by
hash or version, and no time and no directory: two builds of one thing say the same.

Written without in-toto-attestation, whose maps have another order in each process.
"""

import json
from collections.abc import Mapping, Sequence

import msgspec

from xpustack.base.releases import Release
from xpustack.core.errors import CheckFailed
from xpustack.release.inputs import Input
from xpustack.series.patch import Step
from xpustack.series.tree import Tree

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:xpustack:wheel:v1"
BUILDER = "urn:xpustack:own-machine"


def provenance(
    release: Release,
    version: str,
    subjects: Mapping[str, str],
    tip: Tree,
    steps: Sequence[Step],
    parts: Sequence[Input],
    variables: Mapping[str, str],
    tool: Mapping[str, str],
    machine: Mapping[str, str],
) -> str:
    """The statement as JSON text.

    Args:
        subjects: the sha256 of each file that was made, by name; wheel first.
        variables: the environment variables that the build sets.
        tool: the sha256 of each module of the tool.
        machine: the version of each program that takes part.
    """
    statement = {
        "_type": STATEMENT,
        "subject": [
            {"name": name, "digest": {"sha256": value}}
            for name, value in subjects.items()
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "release": release.name,
                    "version": version,
                    "steps": [step.slug for step in steps],
                },
                "internalParameters": {
                    "environment": dict(variables),
                    "machine": dict(machine),
                },
                "resolvedDependencies": [_dependency(part) for part in parts]
                + [
                    {
                        "name": "tree",
                        "digest": {"gitTree": tip.tree_id, "gitCommit": tip.commit},
                    }
                ],
            },
            "runDetails": {
                "builder": {
                    "id": BUILDER,
                    "builderDependencies": [
                        {"name": name, "digest": {"sha256": value}}
                        for name, value in tool.items()
                    ],
                },
            },
        },
    }
    return json.dumps(statement, indent=1) + "\n"


def _dependency(part: Input) -> dict[str, object]:
    entry: dict[str, object] = {"name": part.name, "digest": {"sha256": part.sha256}}
    annotations: dict[str, str] = {"kind": part.kind}
    if part.step is not None:
        annotations["step"] = part.step
    if part.lands is not None:
        annotations["lands"] = part.lands
    entry["annotations"] = annotations
    return entry


class Resource(msgspec.Struct, frozen=True):
    """A file that a statement names."""

    name: str
    digest: dict[str, str] = {}
    annotations: dict[str, str] = {}

    @property
    def sha256(self) -> str:
        return self.digest.get("sha256", "")


class _Definition(msgspec.Struct, frozen=True):
    externalParameters: dict[str, str | list[str]]
    internalParameters: dict[str, dict[str, str]]
    resolvedDependencies: list[Resource]


class _Builder(msgspec.Struct, frozen=True):
    id: str
    builderDependencies: list[Resource]


class _Run(msgspec.Struct, frozen=True):
    builder: _Builder


class _Predicate(msgspec.Struct, frozen=True):
    buildDefinition: _Definition
    runDetails: _Run


class Statement(msgspec.Struct, frozen=True):
    """What is read back from a provenance."""

    subject: list[Resource]
    predicateType: str
    predicate: _Predicate

    @property
    def subjects(self) -> dict[str, str]:
        return {each.name: each.sha256 for each in self.subject}

    @property
    def inputs(self) -> list[Resource]:
        return self.predicate.buildDefinition.resolvedDependencies

    @property
    def tool(self) -> dict[str, str]:
        dependencies = self.predicate.runDetails.builder.builderDependencies
        return {each.name: each.sha256 for each in dependencies}

    @property
    def machine(self) -> dict[str, str]:
        return self.predicate.buildDefinition.internalParameters.get("machine", {})

    @property
    def steps(self) -> list[str]:
        found = self.predicate.buildDefinition.externalParameters.get("steps", [])
        return [found] if isinstance(found, str) else found


def read(data: bytes) -> Statement:
    """Read a provenance that `provenance` wrote.

    Raises:
        CheckFailed: it is no such statement.
    """
    try:
        statement = msgspec.json.decode(data, type=Statement)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckFailed("the provenance cannot be read", detail=str(error)) from None
    if statement.predicateType != PREDICATE:
        raise CheckFailed(
            "the provenance is of another kind", detail=statement.predicateType
        )
    return statement
