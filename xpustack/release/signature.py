# SPDX-License-Identifier: Apache-2.0
"""The provenance in a signed envelope (DSSE), by a key in a file.

The envelope holds the provenance byte for byte, so equal builds still have equal
provenances, and only the envelope depends on who signed. securesystemslib signs and
verifies: Ed25519, ECDSA and RSA keys in PEM.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xpustack.core.errors import CheckFailed, UsageError

ENVELOPE = "provenance.dsse.json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"


@dataclass(frozen=True)
class SignedProvenance:
    """An envelope that was read: what it holds, and the ids of the keys that say they
    signed it. Only `check` says whether they did."""

    payload: bytes
    key_ids: tuple[str, ...]
    envelope: Any

    def check(self, public_key: Path) -> str:
        """Insist that the owner of a public key signed it.

        Returns:
            The key's id.

        Raises:
            CheckFailed: that key did not sign exactly this.
            UsageError: the file holds no public key.
        """
        from securesystemslib.exceptions import VerificationError

        key = _public_key(public_key)
        try:
            self.envelope.verify([key], 1)
        except VerificationError:
            signed_by = ", ".join(self.key_ids) or "nobody"
            raise CheckFailed(
                "the signature is not that of the given key over this content",
                path=public_key,
                detail=[f"the given key: {key.keyid}", f"signed by: {signed_by}"],
            ) from None
        return str(key.keyid)


def require_private_key(path: Path) -> None:
    """Insist that a file holds a private key that can sign.

    Raises:
        UsageError: it does not.
    """
    _signer(path)


def sign(statement: bytes, private_key: Path) -> bytes:
    """The envelope of a statement as JSON text.

    Raises:
        UsageError: the file holds no private key that can sign.
    """
    from securesystemslib.dsse import Envelope

    envelope = Envelope(statement, PAYLOAD_TYPE, {})
    envelope.sign(_signer(private_key))
    return (json.dumps(envelope.to_dict(), indent=1) + "\n").encode()


def read(data: bytes) -> SignedProvenance:
    """Read an envelope.

    Raises:
        CheckFailed: it is no envelope, or of something else than a provenance.
    """
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import Error

    try:
        envelope = Envelope.from_dict(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, Error) as error:
        raise CheckFailed(
            "the envelope cannot be read", detail=f"{type(error).__name__}: {error}"
        ) from None
    if envelope.payload_type != PAYLOAD_TYPE:
        raise CheckFailed(
            "the envelope does not hold a provenance", detail=str(envelope.payload_type)
        )
    return SignedProvenance(envelope.payload, tuple(envelope.signatures), envelope)


def _signer(path: Path) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner

    try:
        return CryptoSigner(load_pem_private_key(path.read_bytes(), password=None))
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(
            "not a private key in PEM without a password",
            path=path,
            detail=str(error),
            hint="openssl genpkey -algorithm ed25519 -out private.pem",
        ) from None


def _public_key(path: Path) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from securesystemslib.signer import SSlibKey

    try:
        return SSlibKey.from_crypto(load_pem_public_key(path.read_bytes()))
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(
            "not a public key in PEM",
            path=path,
            detail=str(error),
            hint="openssl pkey -in private.pem -pubout -out public.pem",
        ) from None
