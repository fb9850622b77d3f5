# SPDX-License-Identifier: Apache-2.0
"""The site's pages that show files of `docs/data` as they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xpustack.core.project import Project
from xpustack.core.rows import read_rows
from xpustack.pages.site.charts import path_charts
from xpustack.pages.site.tables import Page, rows_table

FOLDER = "docs/data"


@dataclass(frozen=True)
class Rows:
    """A table of a page: its place in the page, its heading, and the file of its rows.

    Attributes:
        heading: empty for the first table of a page.
        file: the name in `docs/data`.
        charts: makes Markdown and HTML of the rows, shown above them.
    """

    id: str
    heading: str
    file: str
    charts: Callable[[Sequence[dict[str, str]]], str] | None = None


@dataclass(frozen=True)
class Listing:
    """A page of tables.

    Attributes:
        says: what a row is, and where it is explained.
    """

    title: str
    says: str
    tables: tuple[Rows, ...]


LISTINGS = {
    "capabilities": Listing(
        "Capabilities by release",
        "What DeepSeek-V4 can do on CUDA, and what XPU makes of it before and after the"
        " patches. [How to read a row](docs/capabilities.md).",
        (Rows("capability-rows", "", "capabilities.csv"),),
    ),
    "engine": Listing(
        "The engine beside Hugging Face",
        "Relative errors of each attention layer of a tiny DeepSeek-V4, in the"
        " untouched release and in the patched one. `core` is attention itself."
        " [What is compared](docs/e2e.md).",
        (Rows("engine-rows", "", "e2e.csv"),),
    ),
    "serve": Listing(
        "`vllm serve` by release",
        "What was asked over HTTP of a tiny DeepSeek-V4 on the emulated XPU, and what"
        " came out. [What is run](docs/deploying.md#what-is-run-of-it).",
        (Rows("serve-rows", "", "serve.csv"),),
    ),
    "branches": Listing(
        "XPU branches of vLLM",
        "Each line of v0.23.0 and v0.33.0 that names XPU, and what was found there."
        " [How it was read](docs/xpu_branches.md).",
        (
            Rows("xpu-branches", "", "xpu_branches.csv"),
            Rows("xpu-no-branch", "Without a branch of its own", "xpu_no_branch.csv"),
        ),
    ),
    "quantization": Listing(
        "Quantizations by release",
        "What XPU makes of a checkpoint in each quantization, found by its layers."
        " [How to read a row](docs/checkpoints.md).",
        (Rows("quantization-rows", "", "quantization.csv"),),
    ),
    "xpu_path": Listing(
        "The XPU path on a GPU, by part",
        "Kernel times of one step of vLLM's XPU code on an NVIDIA H200."
        " `in_stand_ins` is the share of torch in place of the ops of"
        " vllm-xpu-kernels, which says nothing about an XPU."
        " [What was run](docs/xpu_path.md).",
        (Rows("xpu-path-rows", "All parts", "xpu_path.csv", path_charts),),
    ),
}
"""The pages by name."""


def listing_page(project: Project, listing: Listing) -> Page:
    """The page, with a link to the file of each table."""
    parts = [f"# {listing.title}", listing.says]
    for rows in listing.tables:
        path = f"{FOLDER}/{rows.file}"
        found = read_rows(project.root / path)
        parts += [rows.charts(found)] if rows.charts else []
        parts += [f"## {rows.heading}"] if rows.heading else []
        parts += [f"All rows: [CSV]({path}).", rows_table(rows.id, found)]
    return "\n\n".join(parts) + "\n", {}
