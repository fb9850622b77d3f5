# SPDX-License-Identifier: Apache-2.0
"""The bill of materials against CycloneDX's own schema and model."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.model.bom import Bom
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from shipped_stack import LAYER, ShippedStack

from stack.release.ship import SBOM


@pytest.fixture
def folder(shipped: ShippedStack) -> Path:
    return shipped.root / "dist/v1.0"


@pytest.fixture
def bill(folder: Path) -> dict[str, Any]:
    return json.loads((folder / SBOM).read_bytes())


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_it_is_valid_by_the_strict_schema(folder: Path, bill: dict[str, Any]):
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str((folder / SBOM).read_text()) is None
    bill["metadata"]["component"]["pedigree"]["patches"][0]["sha256"] = "0"
    assert validator.validate_str(json.dumps(bill)) is not None


def test_its_own_model_reads_the_pedigree_back(
    shipped: ShippedStack, bill: dict[str, Any], folder: Path
):
    main = Bom.from_json(bill).metadata.component  # type: ignore[attr-defined]
    assert (main.name, main.version) == ("vllm", "1.0+xpu.dsv4.1")
    [wheel] = folder.glob("*.whl")
    assert [value.content for value in main.hashes] == [digest(wheel)]
    [base] = main.pedigree.ancestors
    assert [value.content for value in base.hashes] == [shipped.release.sha256]
    urls = {str(patch.diff.url) for patch in main.pedigree.patches}
    assert urls == {
        f"patches/{slug}/v1.0.patch#sha256={digest(shipped.patch(slug))}"
        for slug in ("raise-value", "bring-kernel")
    }


def test_patches_stand_in_their_order(bill: dict[str, Any]):
    patches = bill["metadata"]["component"]["pedigree"]["patches"]
    names = [patch["diff"]["url"].partition("#")[0] for patch in patches]
    assert names == [
        "patches/raise-value/v1.0.patch",
        "patches/bring-kernel/v1.0.patch",
    ]


def test_what_a_step_brings_is_listed_by_hash(
    shipped: ShippedStack, bill: dict[str, Any]
):
    root = shipped.project.root
    files = {
        component["name"]: component["hashes"][0]["content"]
        for component in bill["components"]
        if component["type"] == "file"
    }
    for name in (f"vllm_overlay/common/{LAYER}", "kernels/xpu_dsv4/decode.py"):
        assert files[name] == digest(root / name)
    assert "vllm/model_executor/kernels/xpu_dsv4/_triton.py" in files
    assert len(files) == 2 + 1 + 4


def test_pins_and_runtime_are_required_in_their_versions(bill: dict[str, Any]):
    libraries = {
        component["name"]: component
        for component in bill["components"]
        if component["type"] == "library"
    }
    assert libraries["torch"]["version"] == "2.11.0+xpu"
    assert libraries["vllm-xpu-kernels"]["version"] == "2.11.0"
    [depends] = bill["dependencies"]
    assert set(depends["dependsOn"]) == {
        f"pypi:{name}"
        for name in (
            "intel-sycl-rt",
            "oneccl",
            "torch",
            "triton",
            "vllm-xpu-kernels",
        )
    }


def test_equal_wheels_have_equal_bills_and_others_do_not(
    shipped: ShippedStack, bill: dict[str, Any], tmp_path: Path
):
    artifacts = shipped.ship(tmp_path)
    assert (artifacts.directory / SBOM).read_bytes() == (
        shipped.root / "dist/v1.0" / SBOM
    ).read_bytes()
    other = shipped.ship(tmp_path, "v2.0")
    again = json.loads((other.directory / SBOM).read_bytes())
    assert again["serialNumber"] != bill["serialNumber"]
