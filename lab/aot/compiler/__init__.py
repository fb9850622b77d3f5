# SPDX-License-Identifier: Apache-2.0
"""Intel's compiler: from a launch to machine code, and what that says of itself."""
