# SPDX-License-Identifier: Apache-2.0
"""The emulated XPU with tensors on an NVIDIA GPU: vLLM's platform stays XPU.

vLLM's XPU code path then runs with compiled Triton kernels, captured graphs and
streams. Torch on that device computes what vllm-xpu-kernels would: still a stand-in,
whose time says nothing about an XPU.

| module | what it holds |
|---|---|
| `platform`, `worker` | vLLM's platform and worker classes, on the GPU |
| `communicator` | XPU's collectives, over NCCL |
| `device_api` | the names of `torch.xpu`, bound to those of `torch.cuda` |
| `forms` | stand-ins that stay on the device: nothing waits, all can be captured |
"""
