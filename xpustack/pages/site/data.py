# SPDX-License-Identifier: Apache-2.0
"""The pages of data: the files of `docs/data`, each as a table and as charts, and the
grids of steps and defects by release."""

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from xpustack.base.releases import Releases
from xpustack.core.project import Project
from xpustack.core.rows import read_rows
from xpustack.pages.defects import LIST, Defect, defects
from xpustack.pages.site.charts import CHARTS
from xpustack.pages.status import StepStatus, long_cell, matrix

FOLDER = "docs/data"
PAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "steps": (
        "Steps by release",
        "In a cell of the grid: the checks of the step on the machine that made this"
        " page, how many lines it changes and brings, and its status upstream."
        " `not test`: there is no green result of"
        " its test as it is now. An empty cell: the release does not need the step, or"
        " cannot have it. [How to read a row](docs/steps.md).",
        ("steps.csv",),
    ),
    "requests": (
        "Steps as requests",
        "Where each step of v0.33.0 stands: alone, or after which others; and the files"
        " of vLLM's own tests that name what the steps change, before and after them."
        " [How that is found](docs/upstreaming.md).",
        ("requests.csv", "upstream_tests.csv"),
    ),
    "defects": (
        "Defects by release",
        "`broken`: the patched release has the defect. `fixed`: the published release"
        " has it, a step fixes it, and the step's test fails before and passes after."
        " `absent`: the release does not have it. The second table has the reasons and"
        " what the tests found, before the step and after it."
        " [How the figures come about](docs/defects.md).",
        ("defects.csv",),
    ),
    "engine": (
        "The engine beside Hugging Face",
        "Relative errors of each attention layer of a tiny DeepSeek-V4, in the"
        " untouched release and in the patched one. `core` is attention itself. The"
        " second table is of V4.1 and V4 Vision with compiled kernels on a GPU,"
        " v0.33.0, beside their float32 twins."
        " [What is compared](docs/e2e.md).",
        ("e2e.csv", "e2e_gpu.csv"),
    ),
    "serve": (
        "`vllm serve` by release",
        "What was asked over HTTP of a tiny DeepSeek-V4 on the emulated XPU, and what"
        " came out. [What is run](docs/deploying.md#what-is-run-of-it).",
        ("serve.csv",),
    ),
    "ranks": (
        "Splits over ranks",
        "What a tiny DeepSeek-V4 gives over each split, beside one rank."
        " [What is compared](docs/e2e.md#ranks).",
        ("ranks.csv",),
    ),
    "plans": (
        "Plans of machines",
        "What `xpustack plan` said of each split: GiB of the fullest device, requests"
        " of the whole context that fit, and a **modelled** speed, or why it does not"
        " start."
        " [What a plan is](docs/deploying.md#plan).",
        ("plans.csv",),
    ),
    "capabilities": (
        "Capabilities by release",
        "What DeepSeek-V4 can do on CUDA, and what XPU makes of it before and after the"
        " patches. [How to read a row](docs/capabilities.md).",
        ("capabilities.csv",),
    ),
    "checkpoints": (
        "Checkpoints by release",
        "How each release serves each kind of checkpoint and each quantization."
        " [How to read a row](docs/checkpoints.md).",
        ("checkpoints.csv", "quantization.csv"),
    ),
    "machine_code": (
        "Machine code",
        "Counted in the output of Intel's compiler; no device ran it. **The charts show"
        " Battlemage (`bmg`).** The second table is **modelled, not measured**, from"
        " that machine code and each device's data sheet; the third has Intel's"
        " lowering of the kernels, executed on a CPU."
        " [How they are made](docs/kernels.md).",
        ("machine_code.csv", "cost_model.csv", "lowered.csv"),
    ),
    "speed": (
        "Speed by splits",
        "**Modelled, not measured:** tokens per second of a server, and where a step"
        " spends its time, for splits of Flash and Pro."
        " [What the model knows](docs/speed.md).",
        ("speed_model.csv", "step_model.csv", "sharing_model.csv"),
    ),
    "measurements": (
        "Measurements",
        "**No Intel GPU: NVIDIA GPUs.** Times are microseconds. `graph`, the time in a"
        " captured graph, counts; `direct`, a call from Python, stands in where nothing"
        " was captured. The first table is the newest run of attention and the"
        " compressor. [When and on what](docs/kernels.md).",
        ("benchmark_attention.csv", "benchmark.csv"),
    ),
    "xpu_path": (
        "The XPU path on a GPU, by part",
        "Kernel times of one step of vLLM's XPU code on an NVIDIA H200."
        " `in_stand_ins` is the share of torch in place of the ops of"
        " vllm-xpu-kernels, which says nothing about an XPU. The charts show attention,"
        " which has no stand-ins: `16 at 1,024 tokens` is 16 requests with 1,024 tokens"
        " each. The untouched release forgets the sinks: its times are those of a wrong"
        " result. [What was run](docs/xpu_path.md).",
        ("xpu_path.csv",),
    ),
    "branches": (
        "XPU branches of vLLM",
        "Each line of v0.23.0 and v0.33.0 that names XPU, what was found there, and"
        " what has no branch of its own. [How it was read](docs/xpu_branches.md).",
        ("xpu_branches.csv", "xpu_no_branch.csv"),
    ),
}
"""By name: the title, what a row is, and the files of rows."""
_BY_STEP = re.compile(r"\bby `([a-z0-9-]+)`$")
"""Another step of the series, in the reason why a series lacks a step."""


def write_pages(
    project: Project,
    pinned: Releases,
    statuses: Sequence[StepStatus],
    source: Path,
) -> None:
    """Write every page with its charts to a folder that Sphinx reads."""
    grids = {
        "steps": steps_grid(statuses, pinned.names),
        "defects": defects_grid(project, pinned.names, statuses),
    }
    for name, (title, says, files) in PAGES.items():
        parts = [f"# {title}", says]
        if name in grids:
            parts.append(grids[name])
        for file in files:
            path = f"{FOLDER}/{file}"
            rows = read_rows(project.root / path)
            pictures: list[str] = []
            for chart in CHARTS[file](rows) if file in CHARTS else ():
                picture = f"{Path(file).stem}-{len(pictures)}.svg"
                (source / picture).write_text(chart.svg(), "utf-8")
                pictures.append(f"![{chart.title}]({picture})")
            parts += ["\n".join(pictures), f"All rows: [{file}]({path})."]
            parts.append(table(list(rows[0]), (row.values() for row in rows)))
        (source / f"{name}.md").write_text("\n\n".join(parts) + "\n", "utf-8")


def table(heads: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """An HTML table, which the reader's browser makes sortable. Its cells are text with
    code in backticks; nothing else is read as Markdown."""
    lines = [
        f"<tr>{''.join(f'<td>{_inline(cell)}</td>' for cell in row)}</tr>"
        for row in rows
    ]
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
    return "\n".join(
        [
            f'<div class="table-wrapper"><table><thead><tr>{head}</tr></thead><tbody>',
            *lines,
            "</tbody></table></div>",
        ]
    )


def steps_grid(statuses: Sequence[StepStatus], names: Sequence[str]) -> str:
    """Steps by release, each with its checks, size and status upstream."""
    return table(
        ("step", *names),
        (
            (f"`{slug}`", *(long_cell(status) if status else "" for status in row))
            for slug, row in matrix(statuses, names)
        ),
    )


def defects_grid(
    project: Project, names: Sequence[str], statuses: Sequence[StepStatus]
) -> str:
    """Defects by release: broken, fixed by a step, or absent."""
    listed = defects(project) if (project.root / LIST).is_file() else ()
    has = {(status.release, status.step) for status in statuses}
    return table(
        ("id", "defect", "step", *names),
        (
            (one.id, one.what, f"`{one.step}`", *(verdict(one, n, has) for n in names))
            for one in listed
        ),
    )


def verdict(defect: Defect, release: str, has: set[tuple[str, str]]) -> str:
    """Whether a patched release has a defect, from the pairs of release and step."""
    reason = defect.elsewhere.get(release)
    if reason is None:
        return "fixed" if (release, defect.step) in has else "broken, without a reason"
    if reason.startswith("not fixed"):
        return "broken"
    other = _BY_STEP.search(reason)
    return "fixed" if other and (release, other[1]) in has else "absent"


def _inline(text: str) -> str:
    """Code in tags; a long path may break after a slash."""
    return re.sub(
        r"`([^`]*)`",
        lambda code: f"<code>{code[1].replace('/', '/<wbr>')}</code>",
        html.escape(text.replace("\n", " ")),
    )
