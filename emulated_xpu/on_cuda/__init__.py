# SPDX-License-Identifier: Apache-2.0
"""The emulated XPU's second home: tensors on an NVIDIA GPU, vLLM's platform XPU.

vLLM's XPU code path then runs with compiled Triton kernels, captured graphs and
streams. What vllm-xpu-kernels would compute is torch on that device: a stand-in still,
and its time says nothing about an XPU.

| module | what it holds |
|---|---|
| `platform`, `worker` | vLLM's platform and worker classes, on the GPU |
| `device_api` | the names of `torch.xpu`, bound to their twins in `torch.cuda` |
| `forms` | stand-ins that stay on the device: nothing waits, all can be captured |
"""
