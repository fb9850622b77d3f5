# SPDX-License-Identifier: Apache-2.0
"""What takes the place of hardware that is missing here: an emulated XPU for vLLM, and
Triton's interpreter, repaired, for the kernels.

| module | what it is |
|---|---|
| `emulated_xpu` | the platform, its memory and architecture, the ops of its wheel |
| `interpreter` | repairs of Triton's interpreter |
| `interpreter_speed`, `interpreter_replay` | the same results, sooner |
"""
