# SPDX-License-Identifier: Apache-2.0
"""What XPU's model runner makes of `torch.cuda.is_current_stream_capturing`, which a
torch without CUDA has as a dummy that raises."""

import pytest
import torch
from helpers import layout


@pytest.mark.parametrize("capturing", [False, True])
def test_the_runner_asks_the_stream_of_xpu(
    capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.xpu, "is_current_stream_capturing", lambda: capturing)
    with layout.worker():
        assert torch.cuda.is_current_stream_capturing() is capturing
