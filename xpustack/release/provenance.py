# SPDX-License-Identifier: Apache-2.0
"""A wheel's provenance: an in-toto Statement with a SLSA v1 predicate.

It names the base, every step, the tool and the programs of the machine, each by hash
or version, and the runtime that the base's own files name. It names no time and no
directory, so two builds of the same inputs have equal provenances.

This module does not use in-toto-attestation: the order of its maps differs between
processes.
"""

import json
from collections.abc import Mapping

import msgspec

from xpustack.core.errors import CheckFailed
from xpustack.release.built import WheelBuild
from xpustack.release.resource import Resource
from xpustack.release.runtime import resources

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:xpustack:wheel:v1"
BUILDER = "urn:xpustack:own-machine"


class _BuildDefinition(msgspec.Struct, frozen=True):
    buildType: str
    externalParameters: dict[str, str | list[str]]
    internalParameters: dict[str, dict[str, str]]
    resolvedDependencies: list[Resource]


class _Builder(msgspec.Struct, frozen=True):
    id: str
    builderDependencies: list[Resource]


class _RunDetails(msgspec.Struct, frozen=True):
    builder: _Builder


class _Predicate(msgspec.Struct, frozen=True):
    buildDefinition: _BuildDefinition
    runDetails: _RunDetails


class Statement(msgspec.Struct, frozen=True):
    """A provenance, as it is written and read."""

    kind: str = msgspec.field(name="_type")
    subject: list[Resource]
    predicateType: str
    predicate: _Predicate

    @property
    def subjects(self) -> dict[str, str]:
        return {resource.name: resource.sha256 for resource in self.subject}

    @property
    def inputs(self) -> list[Resource]:
        return self.predicate.buildDefinition.resolvedDependencies

    @property
    def tool(self) -> dict[str, str]:
        dependencies = self.predicate.runDetails.builder.builderDependencies
        return {resource.name: resource.sha256 for resource in dependencies}

    @property
    def machine(self) -> dict[str, str]:
        return self.predicate.buildDefinition.internalParameters.get("machine", {})


def provenance(
    build: WheelBuild, subjects: Mapping[str, str], variables: Mapping[str, str]
) -> str:
    """The statement as JSON text.

    Args:
        subjects: the sha256 of each built file, by name; the wheel first.
        variables: the environment variables that the build sets.
    """
    tree = {"gitTree": build.tip.tree_id, "gitCommit": build.tip.commit}
    definition = _BuildDefinition(
        BUILD_TYPE,
        {
            "release": build.release.name,
            "version": build.version,
            "steps": [step.slug for step in build.steps],
        },
        {"environment": dict(variables), "machine": dict(build.machine)},
        [
            *build.parts,
            Resource("tree", digest=tree),
            *resources(build.runtime),
        ],
    )
    builder = _Builder(BUILDER, _files(build.tool))
    predicate = _Predicate(definition, _RunDetails(builder))
    statement = Statement(STATEMENT, _files(subjects), PREDICATE, predicate)
    return json.dumps(msgspec.to_builtins(statement), indent=1) + "\n"


def read(data: bytes) -> Statement:
    """Read a provenance that `provenance` wrote.

    Raises:
        CheckFailed: it is not such a statement.
    """
    try:
        statement = msgspec.json.decode(data, type=Statement)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckFailed("the provenance cannot be read", detail=str(error)) from None
    if statement.predicateType != PREDICATE:
        raise CheckFailed(
            "the provenance has another format than this tool reads",
            detail=statement.predicateType,
        )
    return statement


def _files(digests: Mapping[str, str]) -> list[Resource]:
    return [Resource(name, digest={"sha256": sha}) for name, sha in digests.items()]
