# SPDX-License-Identifier: Apache-2.0
"""A sigstore of the tests' own: an authority and two logs, with all their keys."""

import base64
import datetime
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

PAYLOAD_TYPE = "application/vnd.in-toto+json"
ISSUER = "https://token.actions.githubusercontent.com"
WORKFLOW = ".github/workflows/release.yml"
REPOSITORY = "someone/stack"
IDENTITY = f"https://github.com/{REPOSITORY}/{WORKFLOW}@refs/tags/release-2026.11"
NOW = datetime.datetime(2026, 11, 1, 12, tzinfo=datetime.UTC)
VALID = datetime.timedelta(minutes=10)
_ISSUER, _REPOSITORY = "1.3.6.1.4.1.57264.1.1", "1.3.6.1.4.1.57264.1.5"
_SCTS = "1.3.6.1.4.1.11129.2.4.2"
_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fake sigstore")])


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def sign(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    return key.sign(data, ec.ECDSA(hashes.SHA256()))


def public(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _der(tag: int, data: bytes) -> bytes:
    size = len(data)
    head = bytes([size]) if size < 128 else bytes([0x82]) + size.to_bytes(2, "big")
    return bytes([tag]) + head + data


def _extension(oid: str, value: bytes) -> x509.UnrecognizedExtension:
    return x509.UnrecognizedExtension(x509.ObjectIdentifier(oid), value)


@dataclass
class FakeSigstore:
    """The keys of the authority, the log of certificates and the log of signatures."""

    authority: ec.EllipticCurvePrivateKey = field(default_factory=new_key)
    certificate_log: ec.EllipticCurvePrivateKey = field(default_factory=new_key)
    signature_log: ec.EllipticCurvePrivateKey = field(default_factory=new_key)

    def __post_init__(self) -> None:
        key = self.authority.public_key()
        usage = dict.fromkeys(
            (
                "digital_signature",
                "content_commitment",
                "key_encipherment",
                "data_encipherment",
                "key_agreement",
                "encipher_only",
                "decipher_only",
            ),
            False,
        )
        self.root = (
            x509.CertificateBuilder(_NAME, _NAME, key, 1)
            .not_valid_before(NOW - 365 * datetime.timedelta(days=1))
            .not_valid_after(NOW + 3650 * datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(True, None), critical=True)
            .add_extension(
                x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
            .sign(self.authority, hashes.SHA256())
        )

    @property
    def trust_config(self) -> bytes:
        """The roots of trust as sigstore's command reads them."""
        span = {"start": "2025-01-01T00:00:00Z"}

        def log(key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
            return {
                "baseUrl": "https://log.example",
                "hashAlgorithm": "SHA2_256",
                "publicKey": {
                    "rawBytes": text(public(key)),
                    "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                    "validFor": span,
                },
                "logId": {"keyId": text(hashlib.sha256(public(key)).digest())},
            }

        der = self.root.public_bytes(serialization.Encoding.DER)
        authority = {
            "subject": {"organization": "fake", "commonName": "fake sigstore"},
            "uri": "https://authority.example",
            "certChain": {"certificates": [{"rawBytes": text(der)}]},
            "validFor": span,
        }
        kind = "application/vnd.dev.sigstore.{}+json"
        roots = {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [log(self.signature_log)],
            "certificateAuthorities": [authority],
            "ctlogs": [log(self.certificate_log)],
            "timestampAuthorities": [],
        }
        signing = {"mediaType": kind.format("signingconfig.v0.2")}
        return json.dumps(
            {
                "mediaType": kind.format("clienttrustconfig.v0.1"),
                "trustedRoot": roots,
                "signingConfig": signing,
            }
        ).encode()

    def certificate(
        self, key: ec.EllipticCurvePrivateKey, identity: str, repository: str
    ) -> x509.Certificate:
        """A certificate of `VALID` from `NOW` on, with the log's timestamp in it."""
        usage = dict.fromkeys(
            (
                "content_commitment",
                "key_encipherment",
                "data_encipherment",
                "key_agreement",
                "key_cert_sign",
                "crl_sign",
                "encipher_only",
                "decipher_only",
            ),
            False,
        )
        owner = self.authority.public_key()
        builder = (
            x509.CertificateBuilder(_NAME, x509.Name([]), key.public_key(), 7)
            .not_valid_before(NOW)
            .not_valid_after(NOW + VALID)
            .add_extension(x509.KeyUsage(digital_signature=True, **usage), True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(owner), False
            )
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity)]),
                critical=True,
            )
            .add_extension(_extension(_ISSUER, ISSUER.encode()), False)
            .add_extension(_extension(_REPOSITORY, repository.encode()), False)
        )
        # The log signs the certificate as it is without the log's own extension.
        bare = builder.sign(self.authority, hashes.SHA256()).tbs_certificate_bytes
        stamp = (int(NOW.timestamp()) * 1000).to_bytes(8, "big")
        issued_by = hashlib.sha256(public(self.authority)).digest()
        signed = sign(
            self.certificate_log,
            b"\0\0"
            + stamp
            + b"\0\1"
            + issued_by
            + len(bare).to_bytes(3, "big")
            + bare
            # no extensions
            + b"\0\0",
        )
        log = hashlib.sha256(public(self.certificate_log)).digest()
        one = b"\0" + log + stamp + b"\0\0" + b"\4\3" + len(signed).to_bytes(2, "big")
        one += signed
        one = len(one).to_bytes(2, "big") + one
        scts = _der(0x04, len(one).to_bytes(2, "big") + one)
        builder = builder.add_extension(_extension(_SCTS, scts), False)
        return builder.sign(self.authority, hashes.SHA256())

    def bundle(
        self,
        payload: bytes,
        *,
        identity: str = IDENTITY,
        repository: str = REPOSITORY,
    ) -> dict[str, Any]:
        """The bundle of a payload that this identity signed."""
        key = new_key()
        certificate = self.certificate(key, identity, repository)
        head = f"DSSEv1 {len(PAYLOAD_TYPE)} {PAYLOAD_TYPE} {len(payload)} ".encode()
        signed = text(sign(key, head + payload))
        envelope = {
            "payload": text(payload),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": signed}],
        }
        der = certificate.public_bytes(serialization.Encoding.DER)
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        return {
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {
                "certificate": {"rawBytes": text(der)},
                "tlogEntries": [self._entry(envelope, payload, signed, pem)],
            },
            "dsseEnvelope": envelope,
        }

    def _entry(
        self,
        envelope: dict[str, Any],
        payload: bytes,
        signed: str,
        pem: bytes,
    ) -> dict[str, Any]:
        """What the log of signatures, which has this one entry, gives back."""
        envelope_hash = hashlib.sha256(json.dumps(envelope).encode()).hexdigest()
        spec = {
            "envelopeHash": {"algorithm": "sha256", "value": envelope_hash},
            "payloadHash": {
                "algorithm": "sha256",
                "value": hashlib.sha256(payload).hexdigest(),
            },
            "signatures": [{"signature": signed, "verifier": text(pem)}],
        }
        record = {"apiVersion": "0.0.1", "kind": "dsse", "spec": spec}
        body = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
        log = hashlib.sha256(public(self.signature_log)).digest()
        seconds = int((NOW + VALID / 2).timestamp())
        promised = {
            "body": text(body),
            "integratedTime": seconds,
            "logID": log.hex(),
            "logIndex": 0,
        }
        promise = json.dumps(promised, sort_keys=True, separators=(",", ":")).encode()
        root = hashlib.sha256(b"\0" + body).digest()
        note = f"log.example\n1\n{text(root)}\n"
        signature = text(log[:4] + sign(self.signature_log, note.encode()))
        return {
            "logIndex": "0",
            "logId": {"keyId": text(log)},
            "kindVersion": {"kind": "dsse", "version": "0.0.1"},
            "integratedTime": str(seconds),
            "inclusionPromise": {
                "signedEntryTimestamp": text(sign(self.signature_log, promise))
            },
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": text(root),
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {
                    "envelope": f"{note}\n\N{EM DASH} log.example {signature}\n"
                },
            },
            "canonicalizedBody": text(body),
        }
