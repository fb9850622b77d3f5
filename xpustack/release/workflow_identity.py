# SPDX-License-Identifier: Apache-2.0
"""Whether a repository's release workflow signed an attestation, by sigstore.

The sigstore library checks that sigstore's authority issued the certificate, that its
logs have certificate and signature, and that the signature was made while the
certificate was valid. The policy here says whose certificate it must be.
"""

import re
from pathlib import Path
from typing import Any

from xpustack.core.errors import CheckFailed, EnvironmentProblem, UsageError
from xpustack.release.attestation import Attestation, subjects_of

ISSUER = "https://token.actions.githubusercontent.com"
"""Who must have vouched for the workflow: the issuer of GitHub's workflow tokens."""
FORGE = "https://github.com"
WORKFLOW = ".github/workflows/release.yml"
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_TAG = r"refs/tags/release-[\w.+-]+"


def check(
    data: bytes,
    identity: str,
    repository: str,
    *,
    trusted_root: Path | None = None,
    offline: bool = False,
) -> Attestation:
    """Insist that the release workflow of a repository signed a bundle, for a tag.

    Args:
        data: the bundle, as `attestation.read` accepts it.
        identity: who signed, as `attestation.read` returns it.
        repository: the repository on GitHub, as `OWNER/NAME`.
        trusted_root: sigstore's roots of trust as JSON; None for those of its public
            instance, which the library downloads, or has with it if `offline`.

    Returns:
        The attestation that the library verified.

    Raises:
        CheckFailed: another workflow signed it, or sigstore did not issue the
            certificate, or a log lacks it, or the signature is another's.
        UsageError: `repository` is no such name, or the file has no roots of trust.
        EnvironmentProblem: sigstore is not installed, or its roots cannot be fetched.
    """
    require_repository(repository)
    home = f"{FORGE}/{repository}"
    workflow = rf"{re.escape(f'{home}/{WORKFLOW}')}@{_TAG}"
    if re.fullmatch(workflow, identity, re.ASCII) is None:
        raise CheckFailed(
            f"the release workflow of {repository} did not sign the attestation",
            detail=[
                f"expected {home}/{WORKFLOW}@refs/tags/release-...",
                f"signed by {identity}",
            ],
        )
    verifier = _verifier(trusted_root, offline)
    from sigstore.errors import Error
    from sigstore.models import Bundle
    from sigstore.verify import policy

    wanted = policy.AllOf(
        [
            policy.OIDCIssuerV2(ISSUER),
            policy.OIDCSourceRepositoryURI(home),
            policy.Identity(identity=identity),
        ]
    )
    try:
        _, payload = verifier.verify_dsse(Bundle.from_json(data), wanted)
        return Attestation(identity, subjects_of(payload))
    except (Error, ValueError, KeyError, TypeError) as error:
        raise CheckFailed(
            f"sigstore does not confirm that {repository} signed the attestation",
            detail=str(error),
        ) from None


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
    try:
        from sigstore.errors import Error
        from sigstore.models import TrustedRoot
        from sigstore.verify import Verifier
    except ImportError:
        raise EnvironmentProblem(
            "sigstore is not installed, which checks who signed an attestation",
            hint="python -m pip install -r requirements/tool.lock",
        ) from None
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
