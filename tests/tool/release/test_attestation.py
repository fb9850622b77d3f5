# SPDX-License-Identifier: Apache-2.0
"""Who signed an attestation, by a sigstore of the test's own: its release workflow, and
every other signer, time and log, each of which is refused."""

import base64
import datetime
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_sigstore import HOME, IDENTITY, NOW, REPOSITORY, VALID, FakeSigstore
from shipped_stack import ShippedStack

from xpustack.core.errors import CheckFailed, UsageError
from xpustack.release import attestation
from xpustack.release.attestation import BUNDLE, Attestation
from xpustack.release.ship import PROVENANCE

ROOT = Path(__file__).parents[3]
STATEMENT = {"subject": [{"name": "a.whl", "digest": {"sha256": "0" * 64}}]}
PAYLOAD = json.dumps(STATEMENT).encode()


@pytest.fixture(scope="module")
def sigstore() -> FakeSigstore:
    return FakeSigstore()


@pytest.fixture(scope="module")
def roots(sigstore: FakeSigstore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("roots") / "trusted_root.json"
    path.write_bytes(sigstore.trusted_root)
    return path


@pytest.fixture(scope="module")
def check(roots: Path) -> Callable[[dict[str, Any]], Attestation]:
    """Judge a bundle as `verify` does."""

    def checked(bundle: dict[str, Any]) -> Attestation:
        data = json.dumps(bundle).encode()
        return attestation.check(data, REPOSITORY, trusted_root=roots)

    return checked


def test_the_release_workflow_of_the_repository_is_accepted(sigstore, check):
    attested = check(sigstore.bundle(PAYLOAD))
    assert attested == Attestation(IDENTITY, {"a.whl": "0" * 64})


def refused(check: Callable[..., Attestation], bundle: dict[str, Any]) -> str:
    """Why a bundle is refused."""
    with pytest.raises(CheckFailed) as caught:
        check(bundle)
    return str(caught.value)


@pytest.mark.parametrize(
    ("signer", "why"),
    [
        ({"issuer": "https://issuer.example"}, "got https://issuer.example, expected"),
        ({"source": f"{HOME}-fork"}, f"got {HOME}-fork, expected"),
        ({"identity": IDENTITY.replace("someone", "another")}, "did not sign"),
        ({"identity": IDENTITY.replace("/stack/", "/stackX/")}, "did not sign"),
        ({"identity": IDENTITY.replace("release.yml", "other.yml")}, "did not sign"),
        ({"identity": IDENTITY.replace("tags/release-", "heads/")}, "did not sign"),
        ({"identity": IDENTITY.replace("/release-", "/nightly-")}, "did not sign"),
        ({"identity": f"{IDENTITY}\nmore"}, "did not sign"),
    ],
    ids=("issuer", "source", "owner", "name", "file", "branch", "tag", "line feed"),
)
def test_another_signer_is_refused(sigstore, check, signer: dict[str, str], why: str):
    assert why in refused(check, sigstore.bundle(PAYLOAD, **signer))


def test_another_authority_is_refused(check):
    assert "signature does not match" in refused(check, FakeSigstore().bundle(PAYLOAD))


@pytest.mark.parametrize(
    ("log", "why"),
    [("certificate_log", "SCT verify failed"), ("signature_log", "invalid log entry")],
)
def test_another_log_is_refused(sigstore: FakeSigstore, check, log: str, why: str):
    keys = {n: getattr(sigstore, n) for n in ("certificate_log", "signature_log")}
    del keys[log]
    other = FakeSigstore(authority=sigstore.authority, **keys)
    assert why in refused(check, other.bundle(PAYLOAD))


@pytest.mark.parametrize("time", [NOW - VALID, NOW + 2 * VALID])
def test_a_signature_outside_the_certificates_minutes_is_refused(
    sigstore, check, time: datetime.datetime
):
    why = refused(check, sigstore.bundle(PAYLOAD, time=time))
    assert "not valid at validation time" in why


def test_a_bundle_that_no_log_has_is_refused(sigstore, check):
    bundle = sigstore.bundle(PAYLOAD)
    bundle["verificationMaterial"]["tlogEntries"] = []
    assert "expected exactly one log entry" in refused(check, bundle)


def test_the_entry_of_another_signature_is_refused(sigstore, check):
    bundle, other = sigstore.bundle(PAYLOAD), sigstore.bundle(PAYLOAD)
    entries = other["verificationMaterial"]["tlogEntries"]
    bundle["verificationMaterial"]["tlogEntries"] = entries
    assert "log entry signatures do not match" in refused(check, bundle)


def test_the_library_checks_the_envelope_as_well(sigstore, roots: Path):
    bundle = sigstore.bundle(PAYLOAD)
    changed = base64.b64encode(PAYLOAD.replace(b"0", b"1")).decode()
    bundle["dsseEnvelope"]["payload"] = changed
    data = json.dumps(bundle).encode()
    with pytest.raises(CheckFailed, match="does not confirm"):
        attestation.check(data, REPOSITORY, trusted_root=roots)


def test_sigstores_public_roots_do_not_know_the_authority(
    sigstore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = json.dumps(sigstore.bundle(PAYLOAD)).encode()
    with pytest.raises(CheckFailed, match="does not confirm"):
        attestation.check(data, REPOSITORY, offline=True)


def test_wrong_words_are_refused_with_the_next_command(sigstore, tmp_path: Path):
    data = json.dumps(sigstore.bundle(PAYLOAD)).encode()
    for repository in ("stack", "a/b/c", "https://x/y", "a b/c", ""):
        with pytest.raises(UsageError, match="is not OWNER/NAME"):
            attestation.check(data, repository)
    for content in ("", "{}", "[]"):
        (tmp_path / "roots").write_text(content)
        with pytest.raises(UsageError, match="no roots of trust"):
            attestation.check(data, REPOSITORY, trusted_root=tmp_path / "roots")


def test_the_workflow_that_is_trusted_is_the_one_that_attests():
    workflow = yaml.safe_load((ROOT / attestation.WORKFLOW).read_text())
    # YAML 1.1 reads the key `on` as true.
    assert workflow[True] == {"push": {"tags": ["release-*"]}}
    uses = [
        step.get("uses", "")
        for job in workflow["jobs"].values()
        for step in job["steps"]
    ]
    assert any(name.startswith("actions/attest-build-provenance@") for name in uses)


def attested(*files: Path) -> bytes:
    """The statement that attests files, each under its folder's name."""
    subjects = [
        {
            "name": f"{file.parent.name}/{file.name}",
            "digest": {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()},
        }
        for file in files
    ]
    return json.dumps({"subject": subjects}).encode()


@pytest.fixture
def wheel(shipped: ShippedStack, tmp_path: Path) -> Path:
    """The wheel of a copy of what `build` made."""
    shutil.copytree(shipped.root / "dist/v1.0", tmp_path / "v1.0")
    return next(tmp_path.glob("v1.0/*.whl"))


def test_the_command_line_names_the_signer_or_what_is_wrong(
    shipped: ShippedStack, sigstore, roots: Path, wheel: Path
):
    place = wheel.parent / BUNDLE
    words = ["verify", str(wheel), "--offline", "--trusted-root", str(roots)]
    named = [*words, "--repository", REPOSITORY]
    done = shipped.run(*named)
    assert done.returncode == 1 and f"{BUNDLE}: missing" in done.stdout
    payload = attested(wheel, wheel.parent / PROVENANCE)
    place.write_text(json.dumps(sigstore.bundle(payload)))
    done = shipped.run(*named)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"attested by {IDENTITY}, whose certificate sigstore issued" in done.stdout
    done = shipped.run(*words, "--repository", "another/stack")
    assert done.returncode == 1
    assert "the release workflow of another/stack did not sign" in done.stdout
    assert f"signed by {IDENTITY}" in done.stdout
    place.write_text(json.dumps(sigstore.bundle(PAYLOAD)))
    done = shipped.run(*named)
    assert done.returncode == 1 and "does not attest this" in done.stdout
    done = shipped.run(*words)
    assert done.returncode == 2 and "without --repository" in done.stderr


def test_a_provenance_that_the_workflow_did_not_attest_is_a_difference(
    shipped: ShippedStack, sigstore, roots: Path, wheel: Path
):
    """Another record of the builder's machine is a note where nobody signed it."""
    statement = wheel.parent / PROVENANCE
    payload = attested(wheel, statement)
    content = json.loads(statement.read_bytes())
    internal = content["predicate"]["buildDefinition"]["internalParameters"]
    internal["machine"]["compiler"] = "c++ 99"
    statement.write_text(json.dumps(content, indent=1) + "\n")
    words = ["verify", str(wheel), "--offline"]
    done = shipped.run(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"note: no workflow attests this wheel: no {BUNDLE}" in done.stdout
    (wheel.parent / BUNDLE).write_text(json.dumps(sigstore.bundle(payload)))
    words += ["--repository", REPOSITORY, "--trusted-root", str(roots)]
    done = shipped.run(*words)
    assert done.returncode == 1
    assert f"{BUNDLE}: it does not attest this {PROVENANCE}" in done.stdout
    assert "1 files differ" in done.stdout


def test_the_files_of_a_wheel_are_attested_in_one_folder():
    files = {"a.whl": "1", "b.json": "2"}
    both = {"v1/a.whl": "1", "v1/b.json": "2", "v2/a.whl": "3", "v2/b.json": "4"}
    assert Attestation("me", both).unattested(files) == []
    apart = {"v1/a.whl": "1", "v2/b.json": "2"}
    assert Attestation("me", apart).unattested(files) == ["b.json"]
    assert Attestation("me", {"a.whl": "1", "b.json": "2"}).unattested(files) == []
    assert Attestation("me", {}).unattested(files) == ["a.whl", "b.json"]
