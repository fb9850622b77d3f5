# SPDX-License-Identifier: Apache-2.0
"""The attestation beside a wheel: the bundle that the release workflow signs.

The sigstore library checks that sigstore's authority issued the certificate, that its
logs have certificate and signature, and that the signature was made while the
certificate was valid. The policy here says whose certificate it must be.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from xpustack.core.errors import CheckFailed, EnvironmentProblem, UsageError
from xpustack.release import inputs
from xpustack.release.difference import Difference
from xpustack.release.ship import PROVENANCE

BUNDLE = "attestation.sigstore.json"
ISSUER = "https://token.actions.githubusercontent.com"
"""Who must have vouched for the workflow: the issuer of GitHub's workflow tokens."""
FORGE = "https://github.com"
WORKFLOW = ".github/workflows/release.yml"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_TAG = r"refs/tags/release-[\w.+-]+"


@dataclass(frozen=True)
class Attestation:
    """A bundle that sigstore confirms.

    Attributes:
        identity: who signed: the address of a workflow, with the tag that it ran on.
        subjects: sha256 by name of each attested file.
    """

    identity: str
    subjects: dict[str, str]

    def unattested(self, files: Mapping[str, str]) -> list[str]:
        """Which files of one folder it does not attest.

        Args:
            files: sha256 by name. The workflow attests all releases at once and names
                each file with its folder, so all must be named in the same one.
        """
        folders = {PurePosixPath(name).parent for name in self.subjects}
        lacking = [
            [
                name
                for name, digest in files.items()
                if self.subjects.get(str(folder / name)) != digest
            ]
            for folder in sorted(folders)
        ]
        return min(lacking, key=len, default=list(files))


def problems(
    wheel: Path,
    repository: str | None,
    trusted_root: Path | None,
    offline: bool,
    notes: list[str],
) -> Iterator[Difference]:
    """Whether the release workflow of the repository attested the wheel and its
    provenance, by the bundle beside them. Without a repository nothing is checked, and
    a note says so.

    Raises:
        UsageError, EnvironmentProblem: as `check`.
    """
    file = wheel.parent / BUNDLE
    if repository is None:
        notes.append(
            "who attested the wheel is NOT checked: name --repository OWNER/NAME"
            if file.is_file()
            else f"no workflow attests this wheel: no {BUNDLE} beside it"
        )
        return
    if not file.is_file():
        yield Difference(BUNDLE, f"missing: no attestation of {repository} to check")
        return
    try:
        attested = check(
            file.read_bytes(), repository, trusted_root=trusted_root, offline=offline
        )
    except CheckFailed as error:
        yield Difference(BUNDLE, error.message, error.detail)
        return
    # The provenance names all other files by hash.
    places = (wheel, wheel.parent / PROVENANCE)
    lacking = attested.unattested(
        {
            place.name: inputs.sha256_of(place.read_bytes())
            for place in places
            if place.is_file()
        }
    )
    if lacking:
        names = " nor this ".join(lacking)
        yield Difference(BUNDLE, f"it does not attest this {names}")
        return
    notes.append(f"attested by {attested.identity}, whose certificate sigstore issued")


def check(
    data: bytes,
    repository: str,
    *,
    trusted_root: Path | None = None,
    offline: bool = False,
) -> Attestation:
    """Insist that the release workflow of a repository signed a bundle, for a tag.

    Args:
        repository: the repository on GitHub, as `OWNER/NAME`.
        trusted_root: sigstore's roots of trust as JSON; None for those of its public
            instance, which the library downloads, or has with it if `offline`.

    Raises:
        CheckFailed: it is no bundle, another workflow signed it, or sigstore did not
            issue the certificate, or a log lacks it, or the signature is another's.
        UsageError: `repository` is no such name, or the file has no roots of trust.
        EnvironmentProblem: sigstore's roots cannot be fetched.
    """
    from sigstore.errors import Error
    from sigstore.models import Bundle
    from sigstore.verify import policy

    require_repository(repository)
    verifier = _verifier(trusted_root, offline)
    home = f"{FORGE}/{repository}"
    try:
        bundle = Bundle.from_json(data)
        identity = _identity(bundle.signing_certificate)
    except (Error, ValueError) as error:
        raise CheckFailed("the attestation cannot be read", detail=str(error)) from None
    workflow = rf"{re.escape(f'{home}/{WORKFLOW}')}@{_TAG}"
    if re.fullmatch(workflow, identity, re.ASCII) is None:
        raise CheckFailed(
            f"the release workflow of {repository} did not sign the attestation",
            detail=[
                f"expected {home}/{WORKFLOW}@refs/tags/release-...",
                f"signed by {identity}",
            ],
        )
    wanted = policy.AllOf(
        [
            policy.OIDCIssuerV2(ISSUER),
            policy.OIDCSourceRepositoryURI(home),
            policy.Identity(identity=identity),
        ]
    )
    try:
        _, payload = verifier.verify_dsse(bundle, wanted)
        subjects = {
            str(subject["name"]): str(subject["digest"]["sha256"])
            for subject in json.loads(payload)["subject"]
        }
    except (Error, ValueError, KeyError, TypeError) as error:
        raise CheckFailed(
            f"sigstore does not confirm that {repository} signed the attestation",
            detail=str(error),
        ) from None
    return Attestation(identity, subjects)


def require_repository(repository: str) -> None:
    """Insist that a name is `OWNER/NAME`.

    Raises:
        UsageError: it is not.
    """
    if _REPOSITORY.fullmatch(repository) is None:
        raise UsageError(
            f"{repository!r} is not OWNER/NAME of a repository",
            hint="xpustack verify --help",
        )


def _verifier(trusted_root: Path | None, offline: bool) -> Any:
    """The library's verifier with the roots of trust."""
    from sigstore.errors import Error
    from sigstore.models import TrustedRoot
    from sigstore.verify import Verifier

    if trusted_root is None:
        try:
            return Verifier.production(offline=offline)
        except Error as error:
            raise EnvironmentProblem(
                "sigstore's roots of trust cannot be fetched",
                detail=str(error),
                hint="the same command with --offline takes those of the library",
            ) from None
    try:
        return Verifier(trusted_root=TrustedRoot.from_file(str(trusted_root)))
    except (Error, OSError, ValueError) as error:
        raise UsageError(
            "the file has no roots of trust of sigstore",
            path=trusted_root,
            detail=str(error),
            hint="gh attestation trusted-root, one line of its output",
        ) from None


def _identity(certificate: Any) -> str:
    """The subject's alternative names: sigstore's certificates have no other."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        ).value
    except x509.ExtensionNotFound:
        return "nobody"
    return ", ".join(str(name.value) for name in names) or "nobody"
