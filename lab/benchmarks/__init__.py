# SPDX-License-Identifier: Apache-2.0
"""Side-by-side benchmarks of the kernels, with a measured roofline."""
