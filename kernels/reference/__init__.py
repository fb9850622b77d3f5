# SPDX-License-Identifier: Apache-2.0
"""Float64 torch references with the names and signatures of `kernels.xpu_dsv4`."""
