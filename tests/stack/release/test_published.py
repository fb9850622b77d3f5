# SPDX-License-Identifier: Apache-2.0
"""What the release workflow publishes of a wheel: its own lines make the archives, and
`verify` and sigstore's own command accept what is in one."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from fake_sigstore import IDENTITY, REPOSITORY, WORKFLOW, FakeSigstore
from shipped_stack import ShippedStack

from stack.release.ship import COMPANION_FILES, CONSTRAINTS, PROVENANCE
from stack.release.verify import BUNDLE

ROOT = Path(__file__).parents[3]
SUMS = "SHA256SUMS"
RELEASE = yaml.safe_load((ROOT / WORKFLOW).read_text())
JOBS = RELEASE["jobs"]


def sums(dist: Path) -> dict[str, str]:
    lines = (dist / SUMS).read_text().splitlines()
    return {name: digest for digest, name in (line.split("  ") for line in lines)}


def attest(sigstore: FakeSigstore, subjects: dict[str, str]) -> bytes:
    """What `attest-build-provenance` makes of these checksums."""
    listed = [{"name": n, "digest": {"sha256": d}} for n, d in subjects.items()]
    payload = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": listed,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {},
    }
    return json.dumps(sigstore.bundle(json.dumps(payload).encode())).encode()


def run_step(name: str, folder: Path, **variables: str) -> None:
    """Run the workflow's own lines on `folder/dist`, as GitHub runs them."""
    [script] = [
        step["run"]
        for job in ("wheels", "publish")
        for step in JOBS[job]["steps"]
        if step.get("name") == name
    ]
    subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=folder,
        env=os.environ | variables,
        check=True,
    )


def publish(folder: Path, bundle: Path) -> None:
    run_step("archives", folder, BUNDLE=str(bundle))


@pytest.fixture(scope="module")
def sigstore() -> FakeSigstore:
    return FakeSigstore()


@pytest.fixture
def published(shipped: ShippedStack, sigstore: FakeSigstore, tmp_path: Path) -> Path:
    """The folder `dist` after the workflow's job `publish`."""
    dist = tmp_path / "dist"
    shutil.copytree(shipped.root / "dist/v1.0", dist / "v1.0")
    run_step("checksums", tmp_path)
    (dist / "site").mkdir()
    bundle = tmp_path / "bundle.jsonl"
    bundle.write_bytes(attest(sigstore, sums(dist)))
    publish(tmp_path, bundle)
    return dist


@pytest.fixture
def got(published: Path, tmp_path: Path) -> Path:
    """The archive, unpacked elsewhere as docs/deploying.md does."""
    place = tmp_path / "got"
    place.mkdir()
    command = ["tar", "-xf", str(published / "v1.0.tar.gz")]
    subprocess.run(command, cwd=place, check=True)
    return place / "v1.0"


@pytest.fixture
def verified(
    shipped: ShippedStack, got: Path
) -> Callable[[], subprocess.CompletedProcess[str]]:
    """`verify` judges what the archive has."""
    [wheel] = got.glob("*.whl")
    return lambda: shipped.run("verify", str(wheel), "--offline")


@pytest.fixture
def refused(
    sigstore: FakeSigstore, got: Path, tmp_path: Path
) -> Callable[..., list[str]]:
    """The files, wheel and provenance, that the page's command of sigstore refuses."""
    (tmp_path / "trust.json").write_bytes(sigstore.trust_config)
    command = [sys.executable, "-m", "sigstore"]
    command += ["--trust-config", str(tmp_path / "trust.json"), "verify", "github"]

    def refused(identity: str = IDENTITY, repository: str = REPOSITORY) -> list[str]:
        words = ["--cert-identity", identity, "--repository", repository, "--offline"]
        words += ["--bundle", str(got / BUNDLE)]
        return [
            file.name
            for file in (*got.glob("*.whl"), got / PROVENANCE)
            if subprocess.run([*command, *words, str(file)], timeout=60).returncode
        ]

    return refused


def test_an_archive_holds_all_that_verify_reads(
    verified: Callable[[], subprocess.CompletedProcess[str]], got: Path, published: Path
):
    here = {path.name for path in got.iterdir()}
    assert here == {path.name for path in (published / "v1.0").iterdir()}
    assert here > {*COMPANION_FILES, BUNDLE}
    done = verified()
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"note: {BUNDLE} is not checked: docs/deploying.md says" in done.stdout
    assert done.stdout.endswith(": verified\n")


@pytest.mark.parametrize("name", [PROVENANCE, CONSTRAINTS])
def test_a_changed_file_of_an_archive_is_named(
    verified: Callable[[], subprocess.CompletedProcess[str]], got: Path, name: str
):
    (got / name).write_text((got / name).read_text() + "\n")
    done = verified()
    assert done.returncode == 1 and f"{name}: " in done.stdout, done.stdout


def test_sigstore_says_that_the_release_workflow_attested_the_files(
    refused: Callable[..., list[str]], got: Path
):
    [wheel] = (path.name for path in got.glob("*.whl"))
    assert refused() == []
    assert refused(repository="another/stack") == [wheel, PROVENANCE]
    for part, other in (("release.yml", "other.yml"), ("tags/release", "heads/main")):
        identity = IDENTITY.replace(part, other)
        assert refused(identity=identity) == [wheel, PROVENANCE], other
    (got / PROVENANCE).write_text((got / PROVENANCE).read_text() + "\n")
    assert refused() == [PROVENANCE]
    (got / BUNDLE).write_text((got / BUNDLE).read_text().replace("1", "2", 1))
    assert refused() == [wheel, PROVENANCE]


def test_the_workflow_that_the_page_names_is_the_one_that_attests():
    # YAML 1.1 reads the key `on` as true.
    assert RELEASE[True] == {"push": {"tags": ["release-*"]}}
    uses = [step.get("uses", "") for job in JOBS.values() for step in job["steps"]]
    assert any(name.startswith("actions/attest-build-provenance@") for name in uses)
    page = (ROOT / "docs/deploying.md").read_text()
    assert f"OWNER/NAME/{WORKFLOW}@refs/tags/release-" in page


def test_a_wheel_alone_names_the_archive(
    verified: Callable[[], subprocess.CompletedProcess[str]], got: Path
):
    for path in got.iterdir():
        if path.suffix != ".whl":
            path.unlink()
    done = verified()
    assert done.returncode == 1
    assert "a published wheel's files are in v1.0.tar.gz beside it" in done.stdout


def test_the_same_files_make_the_same_archive(published: Path, tmp_path: Path):
    before = (published / "v1.0.tar.gz").read_bytes()
    again = tmp_path / "again"
    names = sorted((path.name for path in (published / "v1.0").iterdir()), reverse=True)
    (again / "dist/v1.0").mkdir(parents=True)
    for name in names:
        file = again / "dist/v1.0" / name
        file.write_bytes((published / "v1.0" / name).read_bytes())
        file.chmod(0o600)
    publish(again, published / BUNDLE)
    assert (again / "dist/v1.0.tar.gz").read_bytes() == before
    assert sorted(path.name for path in published.glob("*.tar.gz")) == ["v1.0.tar.gz"]


def test_release_and_pages_carry_archives_and_attestations():
    """The pages get the attestations of the job `publish`, which runs before."""
    [upload] = [
        step["run"].split()
        for step in JOBS["publish"]["steps"]
        if step.get("run", "").startswith("gh release create")
    ]
    assert {f"dist/{SUMS}", f"dist/{BUNDLE}", "dist/v*.tar.gz"} < set(upload)
    [left] = [
        step["with"]
        for step in JOBS["publish"]["steps"]
        if step.get("uses", "").startswith("actions/upload-artifact@")
    ]
    assert left["path"] == f"dist/**/{BUNDLE}"
    taken = [
        step["with"]
        for step in JOBS["pages"]["steps"]
        if step.get("uses", "").startswith("actions/download-artifact@")
    ]
    assert JOBS["pages"]["needs"] == "publish"
    assert {"name": left["name"], "path": "dist"} in taken
