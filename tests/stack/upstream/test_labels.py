# SPDX-License-Identifier: Apache-2.0
"""The labels that upstream's rules give a request."""

import pytest

from stack.upstream.labels import labels

RULES = r"""
pull_request_rules:
- name: label-xpu
  conditions:
    - label != stale
    - or:
      - files=vllm/platforms/xpu.py
      - files~=^vllm/xpu_ops/
      - title~=(?i)XPU
  actions: {label: {add: [intel-gpu]}}
- name: label-cpu
  conditions:
    - label != stale
    - files~=^(?!.*offload).*\bcpu.*
  actions: {label: {add: [cpu]}}
- name: label-python-only
  conditions:
    - -files~=\.cu$
    - files~=\.py$
  actions: {label: {add: [python]}}
- name: comment
  conditions: [check-failure=pre-commit]
  actions: {label: {add: [broken]}}
"""


@pytest.mark.parametrize(
    ("title", "file", "found"),
    [
        ("[XPU] Do it", "vllm/a.txt", ("intel-gpu",)),
        ("[Core] Do it", "vllm/platforms/xpu.py", ("intel-gpu", "python")),
        ("[Core] Do it", "vllm/xpu_ops/a.cu", ("intel-gpu",)),
        ("[Core] Do it", "vllm/cpu_mla.py", ("cpu", "python")),
        ("[Core] Do it", "vllm/cpu_offload.txt", ()),
    ],
)
def test_rules_about_titles_and_files_count(
    title: str, file: str, found: tuple[str, ...]
) -> None:
    assert labels(RULES, title, [file]) == found


def test_a_base_without_rules_gives_no_labels() -> None:
    assert labels("", "[XPU] Do it", ["vllm/a.py"]) == ()
