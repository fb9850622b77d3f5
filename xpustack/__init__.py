# SPDX-License-Identifier: Apache-2.0
"""The tool of the patch stack: it applies, checks, builds, exports and refreshes."""
