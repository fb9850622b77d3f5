# SPDX-License-Identifier: Apache-2.0
"""What an engine is held to, and what came out."""
