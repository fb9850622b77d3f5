# SPDX-License-Identifier: Apache-2.0
"""What tests of an export share: who exports, what is exported, what is written."""

from collections.abc import Iterator
from pathlib import Path

from tiny_stack import TinyStack

from xpustack.export.export import ExportResult, export
from xpustack.export.upstream_trees import Person

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


def written(stack: TinyStack, name: str = "out", **options) -> ExportResult:
    return export(
        stack.project, stack.cache, stack.release, stack.root / name, ME, **options
    )


def files(directory: Path) -> Iterator[str]:
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if path.is_file() and name.parts[0] != "repository":
            yield name.as_posix()
