# SPDX-License-Identifier: Apache-2.0
"""`python -m xpustack`."""

from xpustack.cli import main

main()
