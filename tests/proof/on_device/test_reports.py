# SPDX-License-Identifier: Apache-2.0
"""What a device's report holds, and what `xpustack ingest` takes from one."""

import json
import tarfile
import tomllib
from pathlib import Path

import pytest
from command_line import Result, invoke
from device_calls import call

ROOT = Path(__file__).parents[3]


def ingest(report: Path) -> Result:
    return invoke("ingest", str(report))


def test_the_archive_names_no_host_and_no_user(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "secrethost.example")
    monkeypatch.setattr("getpass.getuser", lambda: "alice")
    monkeypatch.setenv("HOME", "/home/alice")
    assert call(checkout).exit_code == 0
    archive = checkout / ".device/xpu/report/device-report.tar.gz"
    with tarfile.open(archive) as packed:
        assert {member.name.removeprefix("device-report/") for member in packed} >= {
            "report.json",
            "report.md",
            "tuned/intel-b60.json",
            "prove/log.txt",
        }
        for member in packed:
            assert (member.uname, member.gname, member.uid) == ("", "", 0)
            file = packed.extractfile(member)
            assert file is not None
            text = file.read().decode()
            for secret in ("secrethost", "alice", str(checkout)):
                assert secret not in text, (member.name, secret)


def test_a_report_is_taken_in(checkout: Path) -> None:
    assert call(checkout).exit_code == 0
    archive = checkout / ".device/xpu/report/device-report.tar.gz"
    done = ingest(archive)
    assert done.exit_code == 0, done.output
    assert "Arc Pro B60 calibrated" in done.stdout
    page = (checkout / "docs/devices.md").read_text()
    assert page.count("Arc(TM) Pro B60") == 1
    assert "0.40 TB/s" in page and "50.0 µs, 50 % of the roof" in page
    old = tomllib.loads((ROOT / "lab/aot/devices.toml").read_text())["device"]
    new = tomllib.loads((checkout / "lab/aot/devices.toml").read_text())["device"]
    assert list(new) == list(old)
    assert new["Arc Pro B50"] == old["Arc Pro B50"]
    b60 = new["Arc Pro B60"]
    assert (b60["gigabytes_per_second"], b60["dram_share"]) == (400, [1, 1])
    # 160 engines at 2.4 GHz, 4,096 operations a dpas, 80 TFLOP/s.
    assert b60["dpas_clocks"] == pytest.approx(19.7, abs=0.05)
    assert b60["source"].endswith(old["Arc Pro B60"]["source"])
    once = (checkout / "lab/aot/devices.toml").read_text()
    tuned = checkout / "kernels/tuned/intel-b60.json"
    assert "tuned/intel-b60.json: no step reads it yet" in done.stdout
    assert json.loads(tuned.read_text())["rows"] == {"mqa_logits": [{"block_m": 4}]}
    assert ingest(archive).exit_code == 0
    assert (checkout / "lab/aot/devices.toml").read_text() == once
    assert (checkout / "docs/devices.md").read_text() == page


@pytest.mark.parametrize(
    ("field", "value", "code", "said"),
    [
        ("file", "tuned/../../../x.json", 2, "the report's tuned file is"),
        ("rows", {"mqa_logits": []}, 0, "no tuned configuration beat the default"),
        ("schema", None, 2, "`tune` has no schema"),
    ],
)
def test_what_was_tuned_is_not_taken_in(
    checkout: Path, field: str, value: object, code: int, said: str
) -> None:
    assert call(checkout).exit_code == 0
    path = checkout / ".device/xpu/report/report.json"
    report = json.loads(path.read_text())
    (tune,) = (s for s in report["stages"] if s["stage"] == "tune")
    tune["data"][field] = value
    if value is None:
        del tune["data"][field]
    path.write_text(json.dumps(report))
    before = (checkout / "docs/devices.md").read_bytes()
    done = ingest(path)
    assert done.exit_code == code
    assert said in done.output
    assert not (checkout / "kernels/tuned").exists()
    assert ((checkout / "docs/devices.md").read_bytes() == before) == bool(code)


def test_a_calibrated_constant_reaches_the_model(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lab.aot.costs import model

    assert call(checkout).exit_code == 0
    assert ingest(checkout / ".device/xpu/report/report.json").exit_code == 0
    monkeypatch.setattr(model, "DATA", checkout / "lab/aot/devices.toml")
    b60 = next(d for d in model.devices() if d.name == "Arc Pro B60")
    b70 = next(d for d in model.devices() if d.name == "Arc Pro B70")
    assert b60.gigabytes_per_second == 400
    assert b60.dpas_clocks == pytest.approx(19.7, abs=0.05)
    assert b70.dpas_clocks == 16


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("absent.json", None, "there is no such report"),
        ("a.json", b"{", "not a device report"),
        ("a.json", b'{"schema": 99}', "a report of schema 99"),
        ("a.json", b'{"schema": 1, "tool": 3}', "not a device report"),
        ("a.tar.gz", b"nothing", "not an archive of a device report"),
    ],
)
def test_a_report_that_is_none(
    checkout: Path, name: str, content: bytes | None, said: str
) -> None:
    path = checkout / name
    if content is not None:
        path.write_bytes(content)
    before = (checkout / "docs/devices.md").read_bytes()
    done = ingest(path)
    assert done.exit_code == 2
    assert said in done.stderr
    assert (checkout / "docs/devices.md").read_bytes() == before
