# SPDX-License-Identifier: Apache-2.0
"""Stands in for the Python of a machine with a GPU: `fake_python.py WORDS...`.

It writes what the stages' programs would. `FAKE_DEVICE` is a JSON object: `probe`
changes the probe's answers, `hang` and `fail` name programs that hang or fail.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SETTINGS = json.loads(os.environ.get("FAKE_DEVICE", "{}"))
GIB = 1 << 30
DEVICE = {
    "name": "Intel(R) Arc(TM) Pro B60 Graphics",
    "count": 1,
    "properties": {"max_compute_units": 160, "driver_version": "1.6.1"},
    "memory": 24 * GIB,
    "free": 23 * GIB,
    "graphs": True,
    "cuda": "",
}
PROBE = {
    "distributions": {
        "torch": "2.14.0+xpu",
        "triton": "3.8.0",
        "vllm-xpu-kernels": "0.1.15.4",
        "pytest": "9",
    },
    "packages": {"compute-runtime": "26.1 (libze-intel-gpu1)", "IGC": "2.9 (libigc2)"},
    "cards": [{"pci": "8086:e211", "module": "xe"}],
    "modules": ["xe 6.17"],
    "nvidia": "",
    "python": "3.12.3",
    "compiler": True,
    "device": DEVICE,
    "problem": "",
    "launch": "right",
}
JUNIT = """<testsuites><testsuite name="pytest" hostname="secrethost" tests="3">
<testcase classname="a" name="one"/>
<testcase classname="a" name="two"><skipped/></testcase>
<testcase classname="a" name="three">{}</testcase></testsuite></testsuites>"""
ROW = {
    "op": "decode",
    "tokens": 16,
    "heads": 64,
    "keys": 640,
    "candidate": "ours",
    "captured": 50.0,
    "direct": 60.0,
    "roof": 25.0,
    "percent_of_roof": 50.0,
    "speedup_of_ours": 1.0,
    "wrong": "",
    "note": "",
}

COUNTED = {"queries": 1000, "hits": 200, "bytes_read": 127 << 30}
LONGER = {"queries": 2000, "hits": 400, "bytes_read": 254 << 30}
LINK = {
    "gb_per_second": {"copy engine": 27.0, "fetch": 26.0, "host memory": 90.0},
    "steps": [
        {
            "tokens": 1,
            "experts": "25 slots",
            "microseconds": 800.0,
            "hits": 0.5,
            "uva": 1500.0,
        }
    ],
}


def after(words: list[str], option: str) -> Path:
    return Path(words[words.index(option) + 1])


def answers(waves: list[list[dict[str, Any]]], kind: str) -> dict[str, Any]:
    """Tokens that follow from the prompt, with the faults that are asked for."""
    wrong = SETTINGS.get("wrong", ())
    served = [
        [[(sum(p["tokens"]) + i) % 128 for i in range(p["new"])] for p in wave]
        for wave in waves
    ]
    if kind in wrong:
        served[0][1][3] += 1
    if "change" in wrong and kind == "graphs":
        served[-1][0][-1] += 1
    if "repeat" in wrong and kind == "graphs":
        for wave in served[1:]:
            wave[0] = [7] * len(wave[0])
    return {
        "waves": served,
        "not_finite": int("nan" in wrong),
        "seconds": [1.0, 0.5, 0.5 + 127 / 8, 2.0, 1.0, 1.0 + 4 * 127 / 16],
        "seconds_to_ready": 60.0,
        "expert_cache": ([COUNTED, COUNTED, LONGER] * 2)[: len(waves)],
    }


def engine(job: dict[str, Any]) -> dict[str, Any]:
    """What the engine answers; text has one token."""
    arguments = job["engine"]
    if "moe_expert_cache_size" in arguments and "lacks" in SETTINGS:
        return {"lacks": ["moe_expert_cache_size"]}
    kind = "eager" if arguments.get("enforce_eager") else "graphs"
    kind = "hosted" if "moe_expert_cache_size" in arguments else kind
    kind = "ranks" if "tensor_parallel_size" in arguments else kind
    waves = [
        [{"tokens": p.get("tokens", [1]), "new": p["new"]} for p in wave]
        for wave in job["waves"]
    ]
    return answers(waves, kind)


def main(words: list[str]) -> int:
    program = (
        words[1].removeprefix("proof.on_device.").removeprefix("proof.e2e.checkpoints.")
    )
    calls = os.environ.get("FAKE_CALLS")
    if calls:
        with open(calls, "a") as file:
            file.write(f"{program}\n")
    print(f"{program} in /home/alice on secrethost", flush=True)
    if program in SETTINGS.get("hang", ()):
        time.sleep(600)
    failing = program in SETTINGS.get("fail", ())
    if program == "probe":
        probe = {**PROBE, **SETTINGS.get("probe", {})}
        Path(words[-1]).write_text(json.dumps(probe))
    elif program == "pytest":
        (junit,) = (w.partition("=")[2] for w in words if w.startswith("--junit-xml"))
        fault = "<failure>off by 3.1</failure>" if failing else ""
        Path(junit).write_text(JUNIT.format(fault))
    elif program == "machine_code":
        kernel = {"kernel": "_decode_kernel", "warps": 16, "grf": "256", "variants": 2}
        code = {"registers": 256, "spill": 64, "matrix": 48, "problem": ""}
        Path(words[-1]).write_text(json.dumps([{**kernel, **code}]))
    elif program == "lab.benchmarks.run":
        if failing:
            print("the device is lost")
            return 3
        roof = {"bandwidth": 4e11, "matrix": 8e13}
        report = {"environment": {}, "roofline": roof, "rows": [ROW]}
        (after(words, "--out") / "benchmark.json").write_text(json.dumps(report))
    elif program == "lab.benchmarks.expert_cache":
        (after(words, "--out") / "link.json").write_text(json.dumps(LINK))
    elif program == "lab.benchmarks.tune":
        folder = after(words, "--out")
        rows = {"mqa_logits": [{"block_m": 4}]}
        name = DEVICE["name"]
        tuned = {"schema": 1, "device": name, "rows": rows}
        (folder / "intel-b60.json").write_text(json.dumps(tuned))
        (folder / "tried.json").write_text("[]")
    elif program == "engine":
        job = json.loads(Path(words[2]).read_text())
        Path(words[3]).write_text(json.dumps(engine(job)))
    elif program == "reference":
        texts = json.loads(Path(words[3]).read_text())
        wrong = int("reference" in SETTINGS.get("wrong", ()))
        found = [
            {"next": [t + wrong for t in text[1:]] + [0], "lead": [1.0] * len(text)}
            for text in texts
        ]
        Path(words[4]).write_text(json.dumps(found))
    elif program == "all_reduce":
        print("two ranks meet")
    return int(failing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
