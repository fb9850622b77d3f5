# SPDX-License-Identifier: Apache-2.0
"""The signed provenance: who signed, over what, and every way in which that fails."""

import base64
import datetime
import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from shipped_stack import ShippedStack
from typer.testing import CliRunner

from xpustack.cli import app
from xpustack.core.errors import CheckFailed, UsageError
from xpustack.release import signature
from xpustack.release import verify as judge
from xpustack.release.attestation import BUNDLE
from xpustack.release.ship import PROVENANCE, WheelBuild, ship
from xpustack.release.signature import ENVELOPE
from xpustack.release.verify import WheelVerdict


def make_keys(folder: Path, name: str, *algorithm: str) -> tuple[Path, Path]:
    """A private and a public key, as the deploying page says to make them."""
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    words = algorithm or ("-algorithm", "ed25519")
    for command in (
        ["openssl", "genpkey", "-quiet", *words, "-out", str(private)],
        ["openssl", "pkey", "-in", str(private), "-pubout", "-out", str(public)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and "-quiet" in command:
            command.remove("-quiet")
            done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return private, public


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_keys(tmp_path_factory.mktemp("keys"), "ours")


@pytest.fixture(scope="module")
def wheel_build(shipped: ShippedStack) -> WheelBuild:
    return judge.build_release_wheel(
        judge.Runner(), shipped.project, shipped.cache, shipped.release, offline=True
    )


@pytest.fixture
def folder(shipped: ShippedStack, keys: tuple[Path, Path], tmp_path: Path) -> Path:
    """What was handed out, signed."""
    given = Path(shutil.copytree(shipped.root / "dist/v1.0", tmp_path / "given"))
    envelope = signature.sign((given / PROVENANCE).read_bytes(), keys[0])
    (given / ENVELOPE).write_bytes(envelope)
    return given


@pytest.fixture
def judged(
    shipped: ShippedStack,
    folder: Path,
    wheel_build: WheelBuild,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., WheelVerdict]:
    """Judge the wheel without building it again."""
    monkeypatch.setattr(judge, "build_release_wheel", lambda *_, **__: wheel_build)
    [path] = folder.glob("*.whl")
    return lambda key=None: judge.verify(
        shipped.project, shipped.cache, path, public_key=key, offline=True
    )


def envelope_problem(verdict: WheelVerdict) -> str:
    [found] = [item for item in verdict.differences if item.path == ENVELOPE]
    return "\n".join([found.problem, *found.detail])


def test_a_signed_wheel_is_verified_with_the_key(judged, keys: tuple[Path, Path]):
    verdict = judged(keys[1])
    assert verdict.differences == ()
    assert any("is signed by" in note for note in verdict.notes)


@pytest.mark.parametrize(
    "algorithm",
    [
        ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"),
        ("-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"),
    ],
    ids=["ecdsa", "rsa"],
)
def test_other_kinds_of_keys_sign_too(algorithm: tuple[str, ...], tmp_path: Path):
    private, public = make_keys(tmp_path, "other", *algorithm)
    signed = signature.read(signature.sign(b"{}", private))
    assert signed.check(public) == signed.key_ids[0]


def test_without_a_key_it_is_said_that_nobody_checked(judged):
    verdict = judged()
    assert verdict.differences == ()
    assert any("the signature is not checked (--key)" in n for n in verdict.notes)


def test_an_unsigned_wheel_is_called_unsigned(
    judged, folder: Path, keys: tuple[Path, Path]
):
    (folder / ENVELOPE).unlink()
    assert "the provenance is not signed" in judged().notes
    assert "not signed" in envelope_problem(judged(keys[1]))


def test_another_key_is_refused(judged, tmp_path: Path):
    _, public = make_keys(tmp_path, "theirs")
    assert "not that of the given key" in envelope_problem(judged(public))


def test_a_tampered_signature_is_refused(judged, folder: Path, keys: tuple[Path, Path]):
    path = folder / ENVELOPE
    envelope = json.loads(path.read_text())
    raw = bytearray(base64.b64decode(envelope["signatures"][0]["sig"]))
    raw[7] ^= 1
    envelope["signatures"][0]["sig"] = base64.b64encode(raw).decode()
    path.write_text(json.dumps(envelope))
    assert "not that of the given key" in envelope_problem(judged(keys[1]))


def test_a_tampered_payload_is_refused(judged, folder: Path, keys: tuple[Path, Path]):
    path = folder / ENVELOPE
    envelope = json.loads(path.read_text())
    payload = base64.b64decode(envelope["payload"]).replace(b"v1.0", b"v2.0", 1)
    envelope["payload"] = base64.b64encode(payload).decode()
    path.write_text(json.dumps(envelope))
    assert "not that of the given key" in envelope_problem(judged(keys[1]))
    assert "its provenance differs" in envelope_problem(judged())


def test_a_signature_of_another_provenance_is_refused(
    judged, folder: Path, keys: tuple[Path, Path]
):
    (folder / ENVELOPE).write_bytes(signature.sign(b"{}", keys[0]))
    assert "its provenance differs" in envelope_problem(judged(keys[1]))


def test_a_tampered_wheel_is_found_though_the_signature_holds(
    judged, folder: Path, keys: tuple[Path, Path]
):
    [path] = folder.glob("*.whl")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    verdict = judged(keys[1])
    assert any("is signed by" in note for note in verdict.notes)
    files = {item.path for item in verdict.differences}
    assert path.name in files and ENVELOPE not in files


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b'{"payload": 1, "payloadType": "", "signatures": []}']
)
def test_what_is_no_envelope_is_refused(judged, folder: Path, data: bytes):
    (folder / ENVELOPE).write_bytes(data)
    assert "cannot be read" in envelope_problem(judged())


def test_an_envelope_of_something_else_is_refused():
    data = {"payload": "", "payloadType": "text/plain", "signatures": []}
    with pytest.raises(CheckFailed, match="does not hold a provenance"):
        signature.read(json.dumps(data).encode())


def test_the_command_line_signs_and_verifies(
    shipped: ShippedStack, keys: tuple[Path, Path], tmp_path: Path
):
    artifacts = ship(
        shipped.project,
        shipped.cache,
        shipped.release,
        tmp_path,
        private_key=keys[0],
        offline=True,
    )
    assert ENVELOPE in artifacts.files
    wheel = artifacts.directory / artifacts.wheel
    done = shipped.run("verify", str(wheel), "--offline", "--key", str(keys[1]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "note: the provenance is signed by " in done.stdout
    _, theirs = make_keys(tmp_path, "theirs")
    done = shipped.run("verify", str(wheel), "--offline", "--key", str(theirs))
    assert done.returncode == 1 and ENVELOPE in done.stdout


def test_a_file_without_a_key_stops_the_build_before_it_begins(
    shipped: ShippedStack, keys: tuple[Path, Path], tmp_path: Path
):
    for bad in (keys[1], tmp_path / "absent.pem"):
        with pytest.raises(UsageError, match="not a private key"):
            ship(
                shipped.project,
                shipped.cache,
                shipped.release,
                tmp_path / "dist",
                private_key=bad,
                offline=True,
            )
    assert not (tmp_path / "dist").exists()
    with pytest.raises(UsageError, match="not a public key"):
        signature.read(signature.sign(b"{}", keys[0])).check(keys[0])


def test_the_help_names_both_options():
    for command, option in (("build", "--sign-key"), ("verify", "--key")):
        assert option in CliRunner().invoke(app, [command, "--help"]).stdout


def bundle(subjects: dict[str, str], *, chain: bool = False) -> bytes:
    """A sigstore bundle of a made-up workflow: its own key issues its certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    address = x509.UniformResourceIdentifier("https://forge.example/release.yml")
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(minutes=10))
        .add_extension(x509.SubjectAlternativeName([address]), critical=True)
        .sign(key, hashes.SHA256())
    )
    listed = [{"name": n, "digest": {"sha256": d}} for n, d in subjects.items()]
    payload = json.dumps({"subject": listed}).encode()
    kind = signature.PAYLOAD_TYPE
    head = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode()
    signed = key.sign(head + payload, ec.ECDSA(hashes.SHA256()))
    der = certificate.public_bytes(Encoding.DER)
    raw = {"rawBytes": base64.b64encode(der).decode()}
    alone, first = (
        {"certificate": raw},
        {"x509CertificateChain": {"certificates": [raw]}},
    )
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": kind,
        "signatures": [{"sig": base64.b64encode(signed).decode()}],
    }
    material = first if chain else alone
    return json.dumps(
        {"verificationMaterial": material, "dsseEnvelope": envelope}
    ).encode()


@pytest.fixture
def attested(folder: Path) -> Callable[..., None]:
    """Lay the attestation of a workflow beside the wheel."""
    [path] = folder.glob("*.whl")

    def write(name: str = path.name, digest: str = "", **options: bool) -> None:
        actual = hashlib.sha256(path.read_bytes()).hexdigest()
        statement = (folder / PROVENANCE).read_bytes()
        subjects = {
            f"v1.0/{name}": digest or actual,
            f"v1.0/{PROVENANCE}": hashlib.sha256(statement).hexdigest(),
            "v2.0/other.whl": "0" * 64,
        }
        (folder / BUNDLE).write_bytes(bundle(subjects, **options))

    return write


def attestation_problem(verdict: WheelVerdict) -> str:
    [found] = [item for item in verdict.differences if item.path == BUNDLE]
    return "\n".join([found.problem, *found.detail])


@pytest.mark.parametrize("chain", [False, True])
def test_an_attestation_is_read_and_what_is_not_checked_is_said(
    judged, attested: Callable[..., None], chain: bool
):
    attested(chain=chain)
    verdict = judged()
    assert verdict.differences == ()
    [note] = [note for note in verdict.notes if "attested" in note]
    assert "https://forge.example/release.yml" in note
    assert "NOT checked" in note and "--repository OWNER/NAME" in note


def test_an_attestation_of_another_wheel_is_refused(
    judged, attested: Callable[..., None]
):
    attested(digest="1" * 64)
    assert "does not attest this" in attestation_problem(judged())
    attested(name="vllm-9.whl")
    assert "does not attest this" in attestation_problem(judged())


def test_a_tampered_attestation_is_refused(
    judged, attested: Callable[..., None], folder: Path
):
    attested()
    whole = json.loads((folder / BUNDLE).read_bytes())
    payload = base64.b64decode(whole["dsseEnvelope"]["payload"])
    changed = payload.replace(b"other.whl", b"evil.whl0")
    whole["dsseEnvelope"]["payload"] = base64.b64encode(changed).decode()
    (folder / BUNDLE).write_text(json.dumps(whole))
    assert "not that of its certificate" in attestation_problem(judged())
    (folder / BUNDLE).write_text("{}")
    assert "cannot be read" in attestation_problem(judged())
