# SPDX-License-Identifier: Apache-2.0
"""Reads the attestation that the release workflow signs: a sigstore bundle.

This checks its form, its subjects, and that the key of the certificate in the bundle
signed it. `workflow_identity` checks whose certificate it is.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from xpustack.core.errors import CheckFailed
from xpustack.release.signature import PAYLOAD_TYPE

BUNDLE = "attestation.sigstore.json"


@dataclass(frozen=True)
class Attestation:
    """A bundle whose signature fits its certificate.

    Attributes:
        identity: who signed, as the certificate says, such as the address of a
            workflow. Only `workflow_identity.check` says whether that is true.
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


def read(data: bytes) -> Attestation:
    """Read a bundle and check its signature against the certificate in it.

    Raises:
        CheckFailed: it is no such bundle, or the signature is not that of the
            certificate's key over this content.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from securesystemslib.dsse import Envelope

    try:
        bundle = json.loads(data)
        envelope = bundle["dsseEnvelope"]
        payload = base64.b64decode(envelope["payload"])
        signed = Envelope(payload, envelope["payloadType"], {})
        [signature] = envelope["signatures"]
        certificate = x509.load_der_x509_certificate(_certificate(bundle))
        key = certificate.public_key()
        if envelope["payloadType"] != PAYLOAD_TYPE:
            raise ValueError(f"its payload is {envelope['payloadType']}")
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError("its certificate has no key on an elliptic curve")
        given = base64.b64decode(signature["sig"])
        subjects = subjects_of(payload)
        identity = _identity(certificate)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckFailed(
            "the attestation cannot be read", detail=f"{type(error).__name__}: {error}"
        ) from None
    try:
        key.verify(given, signed.pae(), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise CheckFailed(
            "the attestation's signature is not that of its certificate",
            detail=f"certificate of {identity}",
        ) from None
    return Attestation(identity, subjects)


def subjects_of(payload: bytes) -> dict[str, str]:
    """The sha256 by name of each file that an in-toto Statement attests.

    Raises:
        ValueError, KeyError, TypeError: it is no such statement.
    """
    return {
        str(subject["name"]): str(subject["digest"]["sha256"])
        for subject in json.loads(payload)["subject"]
    }


def _certificate(bundle: Any) -> bytes:
    """The signer's certificate (DER): alone, or first of a chain in older bundles."""
    material = bundle["verificationMaterial"]
    if "certificate" in material:
        return base64.b64decode(material["certificate"]["rawBytes"])
    first = material["x509CertificateChain"]["certificates"][0]
    return base64.b64decode(first["rawBytes"])


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
