# SPDX-License-Identifier: Apache-2.0
"""Float64 torch references with the names and signatures of `kernels.xpu_dsv4`.

The docstring of the function with the same name in `kernels.xpu_dsv4` describes the
arguments. References check none: callers pass what the kernel accepts.
"""
