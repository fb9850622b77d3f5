# SPDX-License-Identifier: Apache-2.0
"""vLLM's XPU code path with compiled kernels on an NVIDIA GPU.

| module | where it runs | what it does |
|---|---|---|
| `prepare` | here | packs what the GPU's machine lacks into `.carried/` |
| `run` | on the GPU | unpacks it and runs the jobs, each a process of its own |
| `jobs` | - | what is asked of the engines |
| `written` | on the GPU | serves V4.1 and V4 Vision, whose checkpoints it writes |
| `two_gpus` | - | what is asked of engines over two GPUs |
| `answers` | on the GPU | puts tokens beside those of one GPU |
| `two_page` | here | writes the rows of two GPUs |
| `beside` | here | holds these runs to the float32 twins and to the CPU's tokens |
| `page` | here | compares, and writes `docs/xpu_path.md` |
"""
