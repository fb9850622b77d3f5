# SPDX-License-Identifier: Apache-2.0
"""The parts of the device's programs that need no device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from proof.on_device import machine_code, probe
from proof.on_device.stages import doctor, serve
from proof.on_device.stages.prove import ahead_of_time
from stack.core.process import clean_environment

ROOT = Path(__file__).parents[3]


def card(root: Path, name: str, vendor: str, device: str, module: str) -> None:
    """A graphics card as sysfs shows it."""
    folder = root / name / "device"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{device}\n")
    driver = root / "drivers" / module
    driver.mkdir(parents=True, exist_ok=True)
    (folder / "driver").symlink_to(driver)


def test_intel_cards_alone_are_listed(tmp_path: Path) -> None:
    card(tmp_path, "card0", "0x1a03", "0x2000", "ast")
    card(tmp_path, "card1", "0x8086", "0xe211", "xe")
    (tmp_path / "card1-DP-1").mkdir()
    assert probe.cards(tmp_path) == [{"pci": "8086:e211", "module": "xe"}]
    assert probe.cards(tmp_path / "none") == []


def test_the_probe_answers_where_there_is_no_device(tmp_path: Path) -> None:
    target = tmp_path / "probe.json"
    done = subprocess.run(
        [sys.executable, "-m", "proof.on_device.probe", "xpu", str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(target.read_text())
    assert found["device"] is None
    assert "xpu" in found["problem"]
    assert found["distributions"]["torch"]


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ("0.1.15.4", {"is_xe2_arch": True, "is_xe3_arch": False, "is_pvc": True}),
        ("0.1.8", {"is_pvc": True}),
    ],
)
def test_the_probe_asks_the_kernels_for_the_kind_of_device(
    kernels: str, expected: dict[str, bool]
) -> None:
    path = (ROOT, ROOT / "standins/emulated_xpu/packages")
    done = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import json; from proof.on_device import probe;"
            " print(json.dumps(probe.architecture()))",
        ],
        cwd=ROOT,
        env=clean_environment(
            EMULATED_XPU_KERNELS=kernels,
            EMULATED_XPU_ARCHITECTURE="pvc",
            PYTHONPATH=":".join(map(str, path)),
        ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: found[name] for name in found if "bmg" not in name} == expected
    assert not any(found[name] for name in found if "bmg" in name)


def test_without_the_kernels_the_kind_of_device_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Where the emulated XPU is on the path, its stand-in would be found.
    monkeypatch.setitem(sys.modules, "vllm_xpu_kernels._xpu_C", None)
    assert probe.architecture() == {}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Intel(R) Arc(TM) Pro B60 Graphics", "Arc Pro B60"),
        ("Intel(R) Data Center GPU Max 1550", "Max 1550, one stack"),
        ("Intel(R) Arc(TM) B580 Graphics", ""),
        ("NVIDIA H200", ""),
    ],
)
def test_names_of_devices(name: str, known: str) -> None:
    devices = ["Max 1550, one stack", "Max 1100", "Arc Pro B60", "Arc Pro B50"]
    assert doctor.known_as(name, devices) == known


def kernel(cache: Path, name: str, number: int, files: dict[str, str]) -> None:
    """A compiled kernel as Triton's cache holds it."""
    folder = cache / f"{name}{number}"
    folder.mkdir(parents=True)
    paths = {}
    for suffix, content in files.items():
        path = folder / f"{name}.{suffix}"
        path.write_text(content)
        paths[path.name] = str(path)
    (folder / f"__grp__{name}.json").write_text(json.dumps({"child_paths": paths}))


def test_compiled_kernels_are_read_from_tritons_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, target = tmp_path / "cache", tmp_path / "rows.json"
    listing = (
        "declare <8 x float> @llvm.genx.GenISA.sub.group.dpas.v8f32(i32)\n"
        "  %1 = call <8 x float> @llvm.genx.GenISA.sub.group.dpas.v8f32(i32 1)\n"
        "  %2 = call <8 x float> @llvm.genx.GenISA.sub.group.dpas.v8f32(i32 2)\n"
    )
    meta = '{"num_warps": 16, "grf_mode": "256"}'
    kernel(cache, "_decode_kernel", 1, {"json": meta, "llir": listing, "spv": "x"})
    kernel(cache, "_decode_kernel", 2, {"json": meta, "llir": "", "spv": "x"})
    kernel(cache, "_of_a_test", 1, {"json": meta, "llir": listing, "spv": "x"})
    monkeypatch.setattr(machine_code, "load", lambda files: (256, len(files)))
    machine_code.main(ROOT / "kernels/xpu_dsv4", cache, target)
    (row,) = json.loads(target.read_text())
    assert row == {
        "kernel": "_decode_kernel",
        "warps": 16,
        "grf": "256",
        "variants": 2,
        "registers": 256,
        "spill": 3,
        "matrix": 2,
        "problem": "",
    }


def test_a_kernel_that_the_driver_refuses_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(files: object) -> None:
        raise RuntimeError("ZE_RESULT_ERROR_MODULE_BUILD_FAILURE")

    files = {"json": '{"num_warps": 4}', "ptx": "  mma.sync.aligned"}
    kernel(tmp_path / "cache", "_merge_kernel", 1, files)
    monkeypatch.setattr(machine_code, "load", refuse)
    target = tmp_path / "rows.json"
    machine_code.main(ROOT / "kernels/xpu_dsv4", tmp_path / "cache", target)
    (row,) = json.loads(target.read_text())
    assert (row["matrix"], row["grf"]) == (1, "")
    assert "MODULE_BUILD_FAILURE" in row["problem"]


def test_the_ahead_of_time_rows_are_those_of_the_docs() -> None:
    rows = ahead_of_time(ROOT)
    row = rows["_decode_kernel", 16, "256"]
    assert row == (0, 48)
    assert len(rows) >= 10
    assert ahead_of_time(ROOT / "docs") == {}


def test_answers_that_differ_are_named() -> None:
    assert serve.differences([[1, 2]], [[1, 2]]) == []
    assert serve.differences([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == [
        "request 1, token 1: 4 and 5"
    ]


def test_repeated_tokens_are_named() -> None:
    assert serve.repeated([[7] * 31 + [1]]) == ["request 0: one token 31 times"]
    assert serve.repeated([list(range(32)), [7] * 8]) == []


def test_only_a_sure_reference_counts() -> None:
    prompts = [{"tokens": [5, 6], "new": 3}]
    reference = {"next": [0, 10, 11, 12, 0], "lead": [9, 0.9, 0.1, 0.9, 9]}
    assert serve.disagreements(prompts, [[10, 99, 12]], [reference]) == ([], 2)
    turned = {**reference, "next": [0, -1, 11, 12, 0]}
    assert serve.disagreements(prompts, [[99, 11, 12]], [turned]) == ([], 1)
    faults, sure = serve.disagreements(prompts, [[99, 11, 12]], [reference])
    assert (faults, sure) == (["request 0, token 0: 99 instead of 10"], 2)


def test_the_soak_is_always_the_same() -> None:
    waves = serve.soak()
    assert waves == serve.soak()
    assert sum(map(len, waves)) == serve.SOAK
    assert all(len(p["tokens"]) + p["new"] < 512 for wave in waves for p in wave)
