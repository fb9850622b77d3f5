# SPDX-License-Identifier: Apache-2.0
"""The jobs of upstream's CI that run the exported tests.

One runs them on an XPU, another those marked `any_platform` on the CPU platform. A job
starts where a file changes that it names, so it names what the steps change. A base may
have the job of an earlier export; its job then names more.
"""

import re
from collections.abc import Iterable, Mapping

from stack.core.markdown import rendered
from stack.series.tree import KERNEL_HOME
from stack.upstream.form import TEST_HOME

XPU_JOBS = ".buildkite/intel_jobs/kernels_intel.yaml"
CPU_JOBS = ".buildkite/hardware_tests/cpu.yaml"
CI_FILES = (XPU_JOBS, CPU_JOBS)
_BLOCK = re.compile(r"^- label:.*?(?=^- label:|\Z)", re.MULTILINE | re.DOTALL)
_SOURCES = re.compile(r"(?m)(^  source_file_dependencies:\n)((?:^ +- .*\n)+)")
_KEYS = {XPU_JOBS: "deepseek-v4-xpu", CPU_JOBS: "cpu-deepseek-v4"}


def ci_files(
    texts: Mapping[str, str], changed: Iterable[str], on_cpu: bool
) -> dict[str, str]:
    """The base's CI files that get a job, or whose job names more files.

    Args:
        texts: the base's files of `CI_FILES`, as far as it has them.
        changed: the files that the steps change.
        on_cpu: whether some of their tests are marked `any_platform`.
    """
    sources = {
        KERNEL_HOME if path.startswith(KERNEL_HOME + "/") else path
        for path in changed
        if path.startswith("vllm/")
    }
    made = {}
    for path in CI_FILES if on_cpu else (XPU_JOBS,):
        text = with_job(path, texts[path], sources) if path in texts else None
        if text is not None:
            made[path] = text
    return made


def with_job(path: str, text: str, sources: Iterable[str]) -> str | None:
    """A CI file with the job for `sources`; None if its jobs have an unknown form."""
    blocks = [match[0] for match in _BLOCK.finditer(text)]
    own = [block for block in blocks if f"  key: {_KEYS[path]}\n" in block]
    model = own[0] if own else _new_job(path, blocks)
    if model is None or (listed := _SOURCES.search(model)) is None:
        return None
    indent = listed[2].partition("-")[0]
    named = {line.strip().removeprefix("- ") for line in listed[2].splitlines()}
    wanted = {TEST_HOME, *sources, *(named if own else ())}
    lines = "".join(f"{indent}- {name}\n" for name in sorted(wanted))
    block = model.replace(listed[0], listed[1] + lines)
    if own:
        return text.replace(model, block)
    return f"{text.rstrip()}\n\n{block}"


def _new_job(path: str, blocks: list[str]) -> str | None:
    """A job like the file's others. On an XPU it is a copy of the first, which says how
    the machine is asked for; None if that is not the job of all releases so far."""
    if not blocks:
        return None
    if path == CPU_JOBS:
        values = {"key": _KEYS[path], "test_home": TEST_HOME}
        return rendered("stack.upstream", "cpu_job.yaml", values)
    block, labels = re.subn(r"vLLM IR Tests", "DeepSeek-V4", blocks[0])
    block = re.sub(r"(?m)^(  key: ).*", rf"\1{_KEYS[path]}", block)
    tests = TEST_HOME.removeprefix("tests/")
    block, commands = re.subn(
        r"(?s)pytest -v -s .*'\n*\Z", f"pytest -v -s {tests}'\n", block
    )
    return block if labels and commands else None
