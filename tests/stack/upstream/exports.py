# SPDX-License-Identifier: Apache-2.0
"""What tests of an export share: who exports, what is exported, what is written."""

from collections.abc import Iterator
from pathlib import Path

from tiny_stack import TinyStack

from stack.base.releases import Release
from stack.upstream.export import ExportResult, export
from stack.upstream.trees import Person

ME = Person("Me Myself", "me@localhost")
JOBS = """\
group: Kernels Intel
steps:
- label: ":intel: (BMG) vLLM IR Tests"
  key: vllm-ir-tests
  source_file_dependencies:
    - vllm/ir
  commands:
    - >-
      bash run.sh
      'cd tests &&
      pytest -v -s kernels/ir'
"""
TEMPLATE = """\
## Purpose

## Test Plan

## Test Result

---
<details>
<summary>Checklist</summary>

- [ ] AI assistance was used during the creation of this PR.
</details>
"""


def written(
    stack: TinyStack,
    name: Path | str = "out",
    release: Release | None = None,
    **options,
) -> ExportResult:
    """An export of v1.0, or of another release, to a folder beside the stack."""
    directory = stack.root / name
    options = {"assistant": "an AI tool", **options}
    return export(
        stack.project, stack.cache, release or stack.release, directory, ME, **options
    )


def files(directory: Path) -> Iterator[str]:
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if path.is_file() and name.parts[0] != "repository":
            yield name.as_posix()
