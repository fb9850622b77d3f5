# SPDX-License-Identifier: Apache-2.0
"""What is timed: the inputs of each kernel, ours and the others'."""
