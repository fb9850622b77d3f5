# SPDX-License-Identifier: Apache-2.0
"""Programs that the device's own Python runs: they need torch and Triton, nothing of
the tool. Each writes JSON to the file that its last argument names."""
