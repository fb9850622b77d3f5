# SPDX-License-Identifier: Apache-2.0
"""What is held against something else: vLLM's engine beside its twins, on the emulated
XPU (`e2e`), and what an owner runs on a device (`on_device`)."""
