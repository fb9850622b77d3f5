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
from dataclasses import dataclass

import msgspec
from msgspec import convert

from stack.core.errors import CheckFailed
from stack.release.inputs import WheelBuild
from stack.release.resource import Resource
from stack.release.runtime import resources

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:xpustack:wheel:v1"
BUILDER = "urn:xpustack:own-machine"
_NOT_SUCH = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What reading another document raises."""


@dataclass(frozen=True)
class Statement:
    """What `verify` reads of a provenance: the wheel's inputs, and what its builder
    says of tool and machine."""

    inputs: tuple[Resource, ...]
    tool: Mapping[str, str]
    machine: Mapping[str, str]


def provenance(
    build: WheelBuild, subjects: Mapping[str, str], variables: Mapping[str, str]
) -> str:
    """The statement as JSON text.

    Args:
        subjects: the sha256 of each built file, by name; the wheel first.
        variables: the environment variables that the build sets.
    """
    tree = {"gitTree": build.tip.tree_id, "gitCommit": build.tip.commit}
    statement = {
        "_type": STATEMENT,
        "subject": _files(subjects),
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "release": build.release.name,
                    "version": build.version,
                    "steps": [step.slug for step in build.steps],
                },
                "internalParameters": {
                    "environment": dict(variables),
                    "machine": dict(build.machine),
                },
                "resolvedDependencies": [
                    *build.parts,
                    Resource("tree", digest=tree),
                    *resources(build.runtime),
                ],
            },
            "runDetails": {
                "builder": {"id": BUILDER, "builderDependencies": _files(build.tool)}
            },
        },
    }
    return json.dumps(msgspec.to_builtins(statement), indent=1) + "\n"


def read(data: bytes) -> Statement:
    """Read a provenance that `provenance` wrote.

    Raises:
        CheckFailed: it is not such a statement.
    """
    try:
        statement = msgspec.json.decode(data)
        definition = statement["predicate"]["buildDefinition"]
        builder = statement["predicate"]["runDetails"]["builder"]
        kind, machine = statement["predicateType"], definition["internalParameters"]
        inputs = convert(definition["resolvedDependencies"], tuple[Resource, ...])
        tool = convert(builder["builderDependencies"], tuple[Resource, ...])
        programs = convert(machine.get("machine", {}), dict[str, str])
    except _NOT_SUCH as error:
        raise CheckFailed("the provenance cannot be read", detail=str(error)) from None
    if kind != PREDICATE:
        raise CheckFailed(
            "the provenance has another format than this tool reads", detail=str(kind)
        )
    return Statement(inputs, {part.name: part.sha256 for part in tool}, programs)


def _files(digests: Mapping[str, str]) -> list[Resource]:
    return [Resource(name, digest={"sha256": sha}) for name, sha in digests.items()]
