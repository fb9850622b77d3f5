# SPDX-License-Identifier: Apache-2.0
"""Tests of the lowering itself; those that execute need `--device lowered`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))
