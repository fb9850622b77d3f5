# SPDX-License-Identifier: Apache-2.0
"""The provenance against in-toto's own model, and what it says."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as RawStatement
from shipped_stack import ShippedStack

from stack.builds.build import private_places
from stack.core.errors import CheckFailed
from stack.core.process import Runner
from stack.release import inputs, provenance
from stack.release.ship import COMPANION_FILES, PROVENANCE


@pytest.fixture
def folder(shipped: ShippedStack) -> Path:
    return shipped.root / "dist/v1.0"


@pytest.fixture
def statement(folder: Path) -> dict[str, Any]:
    return json.loads((folder / PROVENANCE).read_bytes())


def test_it_is_a_statement_with_slsa_provenance(statement: dict[str, Any]):
    raw = json_format.ParseDict(statement, RawStatement())
    Statement.copy_from_pb(raw).validate()
    body = json_format.ParseDict(statement["predicate"], Provenance())
    assert body.build_definition.build_type == provenance.BUILD_TYPE
    assert body.run_details.builder.id == provenance.BUILDER
    parts = body.build_definition.resolved_dependencies
    kinds = [part.annotations["kind"] for part in parts if part.annotations]
    assert len(kinds) - kinds.count("runtime") == 2 + 2 + 1 + 4
    # Both images, Python, two packages of the driver, three pins, two over torch's.
    assert kinds.count("runtime") == 10
    statement["predicate"]["buildDefinition"]["steps"] = []
    with pytest.raises(json_format.ParseError):
        json_format.ParseDict(statement["predicate"], Provenance())


def test_it_names_every_file_that_was_made(folder: Path, statement: dict[str, Any]):
    subjects = {file["name"]: file["digest"]["sha256"] for file in statement["subject"]}
    assert set(subjects) == {path.name for path in folder.iterdir()} - {PROVENANCE}
    assert set(COMPANION_FILES) - {PROVENANCE} < set(subjects)
    for name, value in subjects.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == value


def test_it_names_base_steps_tool_and_machine(
    shipped: ShippedStack, statement: dict[str, Any]
):
    definition = statement["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == {
        "release": "v1.0",
        "version": "1.0+xpu.dsv4.1",
        "steps": ["raise-value", "bring-kernel"],
    }
    parts = {part["name"]: part for part in definition["resolvedDependencies"]}
    assert parts["vllm-1.0.tar.gz"]["digest"]["sha256"] == shipped.release.sha256
    patch = parts["patches/bring-kernel/v1.0.patch"]
    assert patch["annotations"] == {"kind": "patch", "step": "bring-kernel"}
    kernel = parts["kernels/xpu_dsv4/decode.py"]
    lands = "vllm/model_executor/kernels/xpu_dsv4/decode.py"
    assert kernel["annotations"]["lands"] == lands
    assert parts["tree"]["digest"]["gitTree"] == shipped.trees()[-1].tree_id
    read = provenance.read(json.dumps(statement).encode())
    assert read.tool == inputs.tool()
    assert read.machine == inputs.machine(Runner())
    assert "stack/release/ship.py" in read.tool and read.machine["compiler"] != "none"


def test_it_says_nothing_of_directories_or_time(
    shipped: ShippedStack, folder: Path, tmp_path: Path
):
    text = (folder / PROVENANCE).read_text()
    for place, _ in private_places(shipped.root):
        assert place not in text
    artifacts = shipped.ship(tmp_path)
    assert (artifacts.directory / PROVENANCE).read_text() == text


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[]", "cannot be read"),
        (b'{"subject": 1}', "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"predicate": {"buildDefinition": []}}', "cannot be read"),
    ],
)
def test_what_is_no_provenance_is_refused(data: bytes, problem: str):
    with pytest.raises(CheckFailed, match=problem):
        provenance.read(data)


def test_another_kind_of_statement_is_refused(statement: dict[str, Any]):
    statement["predicateType"] = "urn:other"
    with pytest.raises(CheckFailed, match="another format"):
        provenance.read(json.dumps(statement).encode())


@pytest.mark.parametrize("compiler", ["c++; touch {}", "$(touch {})", "'open", "/"])
def test_no_shell_reads_the_compiler(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CXX", compiler.format(tmp_path / "touched"))
    assert inputs.machine(Runner())["compiler"] == "none"
    assert not (tmp_path / "touched").exists()
    monkeypatch.setenv("CXX", "env c++")
    assert inputs.machine(Runner())["compiler"] != "none"
