# SPDX-License-Identifier: Apache-2.0
"""What runs inside an installed vLLM: engines, stand-ins, and what they write down."""
