# SPDX-License-Identifier: Apache-2.0
"""Who vouches for a wheel: the signature of its provenance, and the attestation of the
workflow that published it. Both lie beside the wheel."""

from collections.abc import Iterator
from pathlib import Path

from xpustack.core.errors import CheckFailed
from xpustack.release import attestation, inputs, signature, workflow_identity
from xpustack.release.difference import Difference
from xpustack.release.ship import PROVENANCE
from xpustack.release.signature import ENVELOPE


def signature_problems(
    path: Path, public_key: Path | None, notes: list[str]
) -> Iterator[Difference]:
    """The signed envelope beside the wheel: whether it is there, holds this
    provenance, and was signed by the owner of the key."""
    file = path.parent / ENVELOPE
    if not file.is_file():
        if public_key is None:
            notes.append("the provenance is not signed")
        else:
            yield Difference(ENVELOPE, "missing: the provenance is not signed")
        return
    try:
        signed = signature.read(file.read_bytes())
        if public_key is None:
            keys = ", ".join(signed.key_ids) or "nobody"
            notes.append(f"the signature is not checked (--key): it names {keys}")
        else:
            key_id = signed.check(public_key)
            notes.append(f"the provenance is signed by {key_id}")
    except CheckFailed as error:
        yield Difference(ENVELOPE, error.message, error.detail)
        return
    statement = path.parent / PROVENANCE
    if statement.is_file() and statement.read_bytes() != signed.payload:
        yield Difference(ENVELOPE, f"its provenance differs from {PROVENANCE}")


def attestation_problems(
    path: Path,
    repository: str | None,
    trusted_root: Path | None,
    offline: bool,
    notes: list[str],
) -> Iterator[Difference]:
    """The workflow's attestation beside the wheel: whether it attests this wheel and
    its provenance, and, where a repository is named, whether its release workflow
    signed it."""
    file = path.parent / attestation.BUNDLE
    if not file.is_file():
        if repository is not None:
            yield Difference(
                file.name, f"missing: no attestation of {repository} to check"
            )
        else:
            notes.append(f"no workflow attests this wheel: no {file.name} beside it")
        return
    data = file.read_bytes()
    try:
        attested = attestation.read(data)
        if repository is None:
            note = (
                f"attested by a certificate of {attested.identity}; who issued it is"
                " NOT checked: name --repository OWNER/NAME"
            )
        else:
            attested = workflow_identity.check(
                data,
                attested.identity,
                repository,
                trusted_root=trusted_root,
                offline=offline,
            )
            note = f"attested by {attested.identity}, whose certificate sigstore issued"
    except CheckFailed as error:
        yield Difference(file.name, error.message, error.detail)
        return
    # The provenance names all other files by hash.
    places = (path, path.parent / PROVENANCE)
    lacking = attested.unattested(
        {
            place.name: inputs.sha256_of(place.read_bytes())
            for place in places
            if place.is_file()
        }
    )
    if lacking:
        yield Difference(
            file.name, f"it does not attest this {' nor this '.join(lacking)}"
        )
        return
    notes.append(note)
