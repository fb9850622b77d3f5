# SPDX-License-Identifier: Apache-2.0
"""vLLM's XPU code path on a CPU: a platform plugin and stand-ins for its ops.

Stand-ins exist because this project has no Intel GPU. Each has the true schema of its
op in the pinned vllm-xpu-kernels, and computes in plain torch or raises.

| module | what it holds |
|---|---|
| `plugin`, `pytest_plugin` | its entry points: vLLM's plugin, and pytest's `-p` |
| `decisions` | the decisions of a platform that says XPU, on any device |
| `platform`, `worker` | vLLM's platform and worker classes, on the CPU |
| `communicator` | what ranks send each other, over gloo |
| `device_api` | the names that a CPU's torch lacks, with what a device has |
| `registry` | defines the ops of a version with torch, under their true schemas |
| `architectures` | which device it is, and what other devices lack |
| `implementations` | which function computes which op |
| `ops` | those functions, one module per op family |
| `formats` | power-of-two scales, e2m1 codes and MXFP4 values, for several ops |
| `fused_experts` | the Python class around the ops of routed experts |
| `on_cuda` | tensors on an NVIDIA GPU instead, for runs with compiled kernels |
| `pins`, `schemas` | which version is pinned, and the schemas of each version |
| `wheel_schemas` | reads schemas out of a wheel |
| `packages` | the package `vllm_xpu_kernels` that vLLM imports |
"""
