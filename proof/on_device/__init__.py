# SPDX-License-Identifier: Apache-2.0
"""Programs for the Python of a device's owner: `python -m proof.on_device.NAME WORDS`.

They need torch and Triton, and nothing of the tool: the `stages` of `xpustack device`
start them. Each writes JSON to the file that its last argument names.
"""
