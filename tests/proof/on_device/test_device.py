# SPDX-License-Identifier: Apache-2.0
"""`xpustack device` on a machine whose GPU, driver and programs are made up."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from command_line import invoke
from device_calls import call, calls, device, fake, report_of, stages

from proof.on_device.stages.records import STAGES, Kind
from xpustack.commands import device as commands

ROOT = Path(__file__).parents[3]


def test_every_stage_runs_and_the_report_has_all(checkout: Path) -> None:
    done = call(checkout, "--json")
    assert done.exit_code == 0, done.output
    assert stages(done) == {
        "doctor": "passed",
        "prove": "passed",
        "compare": "passed",
        "tune": "passed",
        "link": "passed",
        "serve": "left out",
        "model": "left out",
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
        "copy engine 27.0 GB/s, fetch 26.0 GB/s, host memory 90.0 GB/s",
        "| 1 | 25 slots | 800.0 | 50% | 1500.0 |",
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
