# SPDX-License-Identifier: Apache-2.0
"""`python3 -m lab.benchmarks.xpu_path.run --carried DIR --out DIR [JOB ...]`, on a GPU.

Unpacks what `prepare` packed, and runs each job in a process of its own, with a time
limit. A failed job does not stop the others. Needs nothing but Python.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .jobs import JOBS as ON_ONE
from .jobs import Job
from .ranks.two_gpus import TWO_JOBS

HERE = Path(__file__).resolve()
OWN = HERE.parents[3]
JOBS = ON_ONE | TWO_JOBS
ENTRY = "emulated_xpu_on_cuda = standins.emulated_xpu.plugin:register_on_cuda"


def unpack(carried: Path, work: Path, jobs: list[Job]) -> None:
    """Unpack what was carried, unless it is there; put the untouched tree together if a
    job needs it, and install our platform beside it."""
    if not (work / "unpacked").exists():
        with tarfile.open(carried / "xpu-path.tar.xz") as tar:
            tar.extractall(work, filter="data")
        compile_modules(work, "patched", "site")
        (work / "unpacked").touch()
    untouched = work / "untouched"
    if not untouched.exists() and not all(job.patched for job in jobs):
        # A folder that keeps byte code alone would be a package without a file.
        without_byte_code = shutil.ignore_patterns("__pycache__")
        shutil.copytree(work / "patched", untouched, ignore=without_byte_code)
        for name in (work / "removed").read_text().splitlines():
            (untouched / name).unlink()
            # An empty folder would be a distribution without a version.
            if not any((untouched / name).parent.iterdir()):
                (untouched / name).parent.rmdir()
        shutil.copytree(work / "differing", untouched, dirs_exist_ok=True)
        compile_modules(work, "untouched")
    described = work / "plugin/emulated_xpu-0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text("Name: emulated-xpu\nVersion: 0\n")
    (described / "entry_points.txt").write_text(f"[vllm.platform_plugins]\n{ENTRY}\n")


def compile_modules(work: Path, *trees: str) -> None:
    """Else the first process of each tree compiles 2,000 modules by itself."""
    words = ["-q", "-j", "0", *(str(work / name) for name in trees)]
    subprocess.run([sys.executable, "-m", "compileall", *words], check=False)


def environment(job: Job, work: Path) -> dict[str, str]:
    """The environment variables of a job's process."""
    tree = "patched" if job.patched else "untouched"
    paths = [work / tree, OWN, work / "plugin", work / "site"]
    own = work / "kept" / tree
    wrappers = work / "wrappers"
    return {
        **os.environ,
        **({"EMULATED_XPU_WRAPPERS": str(wrappers)} if wrappers.is_dir() else {}),
        "E2E_HOME": "standins.emulated_xpu.on_cuda.environment",
        "EMULATED_XPU_KERNELS": (work / "xpu-kernels").read_text(),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONUNBUFFERED": "1",
        # Layers marked for compilation run uncompiled.
        "TORCHDYNAMO_DISABLE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TRITON_CACHE_DIR": str(own / "triton"),
        "VLLM_CACHE_ROOT": str(own / "cache"),
        "VLLM_CONFIG_ROOT": str(own / "config"),
        "VLLM_NO_USAGE_STATS": "1",
        **dict(job.environment),
    }


def run(job: Job, work: Path, out: Path) -> dict[str, object]:
    """Run one job; its log and what it answers go to `out`."""
    order = work / f"{job.name}.json"
    order.write_text(json.dumps(job.order(work)))
    started = time.monotonic()
    words = [*job.wrapped_by, sys.executable]
    words += ["-m", job.program, str(order), str(out / f"{job.name}.{job.suffix}")]
    with open(out / f"{job.name}.log", "w") as log:
        try:
            ended = subprocess.run(
                words,
                env=environment(job, work),
                cwd=work,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=job.limit,
            )
            status: object = ended.returncode
        except subprocess.TimeoutExpired:
            status = f"stopped after {job.limit} s"
        except OSError as error:
            status = str(error)
    seconds = round(time.monotonic() - started, 1)
    return {"job": job.name, "status": status, "seconds": seconds}


def machine() -> str:
    """The GPU, and what compiled for it."""
    program = (
        "import torch, triton; print(torch.cuda.get_device_name() + ', torch',"
        " torch.__version__ + ', Triton', triton.__version__)"
    )
    asked = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    return asked.stdout.strip()


def main() -> None:
    """Run the named jobs, all by default; exit with 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--carried", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/xpu-path"))
    parser.add_argument("jobs", nargs="*", metavar="JOB")
    parser.add_argument(
        "--at-once", type=int, default=1, help="jobs that share the GPU (default 1)"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.jobs) - set(JOBS):
        parser.error(
            f"no job is called {', '.join(unknown)}; there are {', '.join(JOBS)}"
        )
    started = time.monotonic()
    for folder in (arguments.work, arguments.out):
        folder.mkdir(parents=True, exist_ok=True)
    jobs = [JOBS[name] for name in arguments.jobs or ON_ONE]
    unpack(arguments.carried, arguments.work, jobs)
    print(f"unpacked in {time.monotonic() - started:.0f} s", flush=True)
    results = []
    pool = ThreadPoolExecutor(arguments.at_once)
    ended = pool.map(lambda job: run(job, arguments.work, arguments.out), jobs)
    for job, result in zip(jobs, ended, strict=True):
        name = job.name
        results.append(result)
        print(result, flush=True)
        if results[-1]["status"] != 0:
            log = (arguments.out / f"{name}.log").read_text().splitlines()
            print("\n".join(line[:400] for line in log[-40:]), flush=True)
    told = {"machine": machine(), "jobs": results}
    (arguments.out / "jobs.json").write_text(json.dumps(told))
    sys.exit(any(result["status"] != 0 for result in results))


if __name__ == "__main__":
    main()
