# SPDX-License-Identifier: Apache-2.0
"""Forms of the attention kernels for NVIDIA GPUs, which no wheel and no step brings.

The kernels of `xpu_dsv4` run on CUDA as they are. These forms take their place in tests
and benchmarks, to be compared with what others have there.
"""

from .forms import forms, use

__all__ = ["forms", "use"]
