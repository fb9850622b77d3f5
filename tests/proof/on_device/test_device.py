# SPDX-License-Identifier: Apache-2.0
"""`xpustack device` on a machine whose GPU, driver and programs are made up."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from command_line import Result, invoke

from proof.on_device.stages.prove import AHEAD_OF_TIME
from proof.on_device.stages.records import STAGES, Kind
from xpustack.commands import device as commands

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with what stages look at, and a Python that stands in for a GPU's."""
    root = tmp_path / "checkout"
    (root / "docs/data").mkdir(parents=True)
    for name in ("releases.toml", "pyproject.toml", AHEAD_OF_TIME):
        shutil.copy(ROOT / name, root / name)
    for folder in ("kernels", "lab/aot"):
        shutil.copytree(
            ROOT / folder,
            root / folder,
            ignore=shutil.ignore_patterns("__pycache__", "tuned"),
        )
    for folder in ("lab/benchmarks", "proof", "tests/kernels"):
        (root / folder).mkdir(parents=True)
    (root / "docs/devices.md").write_text(
        "# Devices\n\n<!-- devices: begin -->\n<!-- devices: end -->\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE}/fake_python.py "$@"\n')
    python.chmod(0o755)
    monkeypatch.chdir(root)
    monkeypatch.setenv("FAKE_CALLS", str(tmp_path / "calls"))
    return root


def call(checkout: Path, *words: str) -> Result:
    """Run the command in the checkout."""
    python = str(checkout.parent / "python")
    return invoke("device", "--python", python, *words)


def ingest(report: Path) -> Result:
    return invoke("ingest", str(report))


def calls(checkout: Path) -> list[str]:
    """Programs that ran, in order; forgotten afterwards."""
    path = checkout.parent / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return [line for line in lines if line != "all_reduce"]


def fake(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    monkeypatch.setenv("FAKE_DEVICE", json.dumps(settings))


def stages(done: Result) -> dict[str, str]:
    data = json.loads(done.stdout)["data"]
    return {stage["stage"]: stage["status"] for stage in data["stages"]}


def report_of(checkout: Path) -> dict[str, Any]:
    path = checkout / ".device/xpu/report/report.json"
    return json.loads(path.read_text())


def test_every_stage_runs_and_the_report_has_all(checkout: Path) -> None:
    done = call(checkout, "--json")
    assert done.exit_code == 0, done.output
    assert stages(done) == {
        "doctor": "passed",
        "prove": "passed",
        "compare": "passed",
        "tune": "passed",
        "serve": "left out",
    }
    report = report_of(checkout)
    assert report["schema"] == 1
    facts = {fact["name"]: (fact["found"], fact["pinned"]) for fact in report["facts"]}
    assert facts["torch"] == ("2.14.0+xpu", "2.14.0")
    assert facts["Xe-cores"] == ("20", "")
    assert facts["PCI id"] == ("8086:e211", "")
    page = (checkout / ".device/xpu/report/report.md").read_text()
    for text in (
        "Pro B60",
        "_decode_kernel",
        "50 %",
        "vllm is not installed",
        "spills",
    ):
        assert text in page or text in page.replace("| 50 |", "50 %"), text


def test_the_first_and_the_last_line_name_the_device(checkout: Path) -> None:
    lines = call(checkout, "doctor").stdout.splitlines()
    said = "device: Intel(R) Arc(TM) Pro B60 Graphics (--device xpu)"
    assert (lines[0], lines[-1]) == (said, said)


def test_a_stage_of_its_own(checkout: Path) -> None:
    assert call(checkout, "tune").exit_code == 0
    assert calls(checkout) == ["probe", "lab.benchmarks.tune"]
    assert (checkout / ".device/xpu/tuned/intel-b60.json").is_file()


def test_finished_stages_are_kept_and_failed_ones_repeated(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, fail=["lab.benchmarks.run"])
    done = call(checkout, "prove", "compare", "tune", "--json")
    assert done.exit_code == 1
    assert stages(done)["compare"] == "failed"
    assert "the device is lost" in done.stdout
    calls(checkout)
    fake(monkeypatch)
    assert call(checkout, "prove", "compare", "tune").exit_code == 0
    assert calls(checkout) == ["probe", "lab.benchmarks.run"]
    assert call(checkout, "prove", "--again").exit_code == 0
    assert calls(checkout) == ["probe", "pytest", "machine_code"]


def test_other_versions_and_other_code_keep_nothing(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(checkout, "prove").exit_code == 0
    changed = {"torch": "2.15.0", "pytest": "9"}
    fake(monkeypatch, probe={"distributions": changed})
    calls(checkout)
    call(checkout, "prove")
    assert "pytest" in calls(checkout)
    (checkout / "kernels/new.py").write_text("")
    call(checkout, "prove")
    assert "pytest" in calls(checkout)


def test_a_killed_run_goes_on(checkout: Path) -> None:
    """SIGKILL while it compares: what it proved is kept, nothing else is left."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "FAKE_DEVICE": json.dumps({"hang": ["lab.benchmarks.run"]}),
    }
    words = ["device", "--python", str(checkout.parent / "python"), "prove", "compare"]
    child = subprocess.Popen(
        [sys.executable, "-m", "xpustack", *words],
        cwd=checkout,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    path = checkout.parent / "calls"
    limit = time.monotonic() + 60
    while not (path.exists() and "lab.benchmarks.run" in path.read_text()):
        assert time.monotonic() < limit and child.poll() is None
        time.sleep(0.1)
    child.kill()
    child.wait()
    calls(checkout)
    assert call(checkout, "prove", "compare").exit_code == 0
    assert calls(checkout) == ["probe", "lab.benchmarks.run"]


def test_a_driver_that_hangs_costs_its_stage(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, hang=["pytest"])
    begin = time.monotonic()
    # One minute is the least; the stage itself gets 0.8 of it.
    monkeypatch.setattr("proof.on_device.stages.prove.TEST_SHARE", 0.05)
    done = call(checkout, "prove", "tune", "--minutes", "1", "--json")
    assert done.exit_code == 1
    assert stages(done) == {"doctor": "passed", "prove": "failed", "tune": "passed"}
    assert "did not end within 3 s" in done.stdout
    assert "dmesg" in done.stdout
    assert time.monotonic() - begin < 45


def test_a_hanging_probe_is_an_error(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, hang=["probe"])
    monkeypatch.setattr("proof.on_device.stages.doctor.PROBE_SECONDS", 2.0)
    done = call(checkout, "--json")
    assert done.exit_code == 5
    error = json.loads(done.stdout)["errors"][0]
    assert "did not end within 2 s" in error["message"]
    assert "dmesg" in error["next"]


NO_DEVICE = {"device": None, "problem": "RuntimeError: torch sees no xpu device"}


@pytest.mark.parametrize(
    ("probe", "said"),
    [
        (
            {**NO_DEVICE, "distributions": {}},
            "name a Python that has torch for XPU: --python",
        ),
        (
            {**NO_DEVICE, "problem": "RuntimeError: torch 2.14 has no torch.xpu"},
            "install torch for XPU",
        ),
        ({**NO_DEVICE, "cards": []}, "lspci"),
        ({**NO_DEVICE, "packages": {}}, "install Intel's compute runtime"),
        (NO_DEVICE, "in the group render"),
    ],
)
def test_no_gpu_is_an_error_with_the_next_command(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, probe: dict[str, Any], said: str
) -> None:
    fake(monkeypatch, probe=probe)
    done = call(checkout, "--json")
    assert done.exit_code == 5
    assert said in json.loads(done.stdout)["errors"][0]["next"]
    assert calls(checkout) == ["probe"]


def test_a_device_that_runs_no_kernel_gets_a_report_of_that(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, probe={"launch": "RuntimeError: no cc", "compiler": False})
    done = call(checkout, "--json")
    assert done.exit_code == 1
    assert stages(done) == {"doctor": "failed"}
    assert "install a C++ compiler" in done.stdout
    assert calls(checkout) == ["probe"]
    assert report_of(checkout)["stages"][0]["status"] == "failed"


def device(**changes: Any) -> dict[str, Any]:
    from fake_python import DEVICE

    return {"device": {**DEVICE, **changes}}


def test_a_gpu_of_an_unknown_name_is_a_finding(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, probe=device(name="Intel(R) Arc(TM) Z9"))
    done = call(checkout, "doctor", "prove")
    assert done.exit_code == 0, done.output
    assert "Arc(TM) Z9 is not in lab/aot/devices.toml" in done.stdout


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ({"is_xe2_arch": True, "is_pvc": False}, ""),
        ({"is_xe2_arch": True, "is_pvc": True}, "wrong text on two Max 1100"),
        (
            {"is_xe2_arch": False, "is_xe3_arch": True},
            "answers no prompt of DeepSeek-V4 on it. Its op of the indexer's scores",
        ),
        (
            {"is_xe2_arch": False, "is_xe3_arch": False},
            "answers no prompt of DeepSeek-V4 on it. Its experts",
        ),
    ],
)
def test_what_the_kind_of_device_keeps_a_release_from_is_a_finding(
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: dict[str, bool],
    said: str,
) -> None:
    fake(monkeypatch, probe=device(architecture=architecture))
    done = call(checkout, "doctor", "--json")
    assert done.exit_code == 0, done.output
    found = [
        finding["what"]
        for stage in json.loads(done.stdout)["data"]["stages"]
        for finding in stage["findings"]
    ]
    assert len(found) == bool(said), found
    assert said in "".join(found)


@pytest.mark.parametrize(
    ("memory", "free"), [(4 << 30, 3 << 30), (24 << 30, 1 << 30)], ids=["small", "used"]
)
def test_too_little_memory_leaves_out_what_needs_it(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, memory: int, free: int
) -> None:
    fake(monkeypatch, probe=device(memory=memory, free=free))
    done = call(checkout, "--json")
    assert done.exit_code == 0
    found = stages(done)
    assert (found["prove"], found["compare"]) == ("passed", "left out")
    assert found["tune"] == "left out"
    assert "compare and tune need 6 GiB" in done.stdout


def test_versions_beside_the_pin(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "pins" not in call(checkout, "doctor").stdout
    done = call(checkout, "doctor", "--release", "v0.22.1")
    assert "torch 2.14.0+xpu; v0.22.1 pins 2.11.0" in done.stdout


def test_a_failed_test_is_named(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, fail=["pytest"])
    done = call(checkout, "prove")
    assert done.exit_code == 1
    assert "failed: a::three" in done.stdout


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


def serving(monkeypatch: pytest.MonkeyPatch, devices: int = 1, **settings: Any) -> None:
    """The fake has vLLM, and `devices` devices."""
    from fake_python import PROBE

    installed = {**PROBE["distributions"], "vllm": "0.33.0"}
    probe = {**device(count=devices), "distributions": installed}
    fake(monkeypatch, probe=probe, **settings)


def test_serve_runs_its_checks(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving(monkeypatch)
    done = call(checkout, "serve", "report", "--json")
    assert done.exit_code == 0, done.output
    assert "5 of 5 checks passed" in done.stdout
    assert calls(checkout) == ["probe", "checkpoint", *["engine"] * 2, "reference"]
    page = (checkout / ".device/xpu/report/report.md").read_text()
    assert "| an all-reduce of two ranks |" not in page
    assert "| the same requests get the same tokens again | passed | 240 req" in page


def test_two_devices_serve_as_two_ranks(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving(monkeypatch, devices=2)
    done = call(checkout, "serve")
    assert done.exit_code == 0, done.output
    assert "7 of 7 checks passed" in done.stdout


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("graphs", "eager and captured engines give the same tokens: request 1"),
        ("reference", "the tokens are those of Hugging Face's model"),
        ("nan", "no log probability is NaN or infinite: 1 are"),
        ("repeat", "no answer repeats one token: request"),
        ("change", "the same requests get the same tokens again: request"),
        ("ranks", "two ranks give the tokens of one: request 1, token 3"),
    ],
)
def test_what_serve_sees(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, fault: str, said: str
) -> None:
    serving(monkeypatch, devices=2, wrong=[fault])
    done = call(checkout, "serve")
    assert done.exit_code == 1
    assert f"serve: {said}" in done.stdout


def test_an_all_reduce_that_hangs_keeps_the_ranks_from_starting(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proof.on_device.stages.serve.ALL_REDUCE_SECONDS", 2.0)
    serving(monkeypatch, devices=2, hang=["all_reduce"])
    done = call(checkout, "serve", "--json")
    assert done.exit_code == 1
    assert "an all-reduce of two ranks: did not end within 2 s" in done.stdout
    assert calls(checkout).count("engine") == 2
    serve = json.loads(done.stdout)["data"]["stages"][1]
    assert len(serve["data"]["checks"]) == 5


def test_an_engine_that_fails_shows_its_last_lines(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving(monkeypatch, fail=["engine"])
    done = call(checkout, "serve")
    assert done.exit_code == 1
    assert "the engine, eager ended with exit status 1" in done.stdout


def test_wrong_words(checkout: Path) -> None:
    done = call(checkout, "proof")
    assert done.exit_code == 2
    assert "'proof' is no stage" in done.stderr
    done = invoke("device", "--python", "/nowhere/python")
    assert done.exit_code == 2
    assert "no such Python" in done.stderr


def test_the_help_names_all_stages_and_kinds() -> None:
    """The tool cannot import them before it is called."""
    assert f"stage: {', '.join(STAGES)};" in (commands.device.__doc__ or "")
    assert get_type_hints(commands.device)["kind"] == Kind


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
