# SPDX-License-Identifier: Apache-2.0
"""`xpustack device serve` around a real engine: on the emulated XPU, so that it is the
stage that is tested here and not the device. Runs with --full, on the newest release.
"""

import sys
from pathlib import Path

import pytest

from proof.e2e.running.server import checkpoint_of
from proof.e2e.running.serving import Engines
from proof.on_device.stages import model
from proof.on_device.stages import serve as stage
from proof.on_device.stages.setup import Setup
from stack.base.releases import load
from stack.core.process import Runner

pytestmark = [pytest.mark.full, pytest.mark.newest]
PYTHON = """\
#!{python}
import os, sys
BEGIN = (
    "import runpy, sys; import standins.emulated_xpu.pytest_plugin;"
    "import proof.e2e.inside.engine_ops;"
    "from standins import interpreter, interpreter_speed;"
    "sys.argv = sys.argv[2:]; {repair}; interpreter_speed.speed_up();"
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
own = {{**os.environ, **{environment}}}
own["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
os.execve(sys.executable, [sys.executable, "-c", BEGIN, *sys.argv[1:]], own)
"""
"""An interpreter whose programs see the emulated XPU and the patched release."""


REPAIR = "interpreter.repair()"
"""Without it Triton's interpreter computes wrong FP8 and bf16 values."""


def setup(engines: Engines, release: str, tmp_path: Path, repair: str) -> Setup:
    python = tmp_path / "python"
    environment = engines.environment(release, tmp_path / "own")
    program = PYTHON.format(
        python=sys.executable, environment=environment, repair=repair
    )
    python.write_text(program)
    python.chmod(0o755)
    probe = {"distributions": {"vllm": "patched"}, "device": {"count": 1}}
    pinned = load(engines.project)[release]
    return Setup(
        engines.project,
        "xpu",
        pinned,
        str(python),
        tmp_path / "out",
        30.0,
        Runner(),
        print,
        probe,
    )


@pytest.mark.parametrize("repair", [REPAIR, "0"], ids=["right", "wrong"])
def test_the_stage_sees_whether_the_engine_is_right(
    engines: Engines,
    release: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    repair: str,
) -> None:
    place = setup(engines, release, tmp_path, repair)
    few = [stage.prompt(1, 32, 100), stage.prompt(63, 8, 101)]
    monkeypatch.setattr(stage, "soak", lambda: [few])
    outcome = stage.serve(place)
    checks = {check["check"]: check["verdict"] for check in outcome.data["checks"]}
    assert len(checks) == 6, (outcome, place.folder("serve") / "log.txt")
    reference = checks.pop(
        "the tokens are those of Hugging Face's model, where that is sure"
    )
    assert reference == ("passed" if repair == REPAIR else "failed"), outcome
    assert set(checks.values()) == {"passed"}, outcome


def test_an_owners_checkpoint_tells_its_hits(
    engines: Engines,
    release: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = setup(engines, release, tmp_path, REPAIR)
    place.model, _ = engines.written(checkpoint_of(engines, release))
    monkeypatch.setattr(model, "CHARACTERS", 200)
    monkeypatch.setattr(model, "NEW", 3)
    # The emulated device has no memory to share out.
    fewer = {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024}
    fewer["moe_expert_cache_size"] = 4
    monkeypatch.setattr(model, "ENGINE", model.ENGINE | fewer)
    outcome = model.serve(place)
    assert outcome.status == "passed", (outcome, place.folder("model") / "log.txt")
    assert 0 < outcome.data["hits"] < 1
    assert outcome.data["gib_of_a_token"] > 0
    assert outcome.data["tokens_per_second_of_one"] > 0
