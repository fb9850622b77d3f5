# SPDX-License-Identifier: Apache-2.0
"""What the machine code costs on a device, by a model: kernels, steps, speed."""
