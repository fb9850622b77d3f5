# SPDX-License-Identifier: Apache-2.0
"""The processes of a runner end with the runner and with the tool."""

import subprocess
import threading
import time
from pathlib import Path

import psutil
from children import killed, read_until, start

from stack.core.process import Runner, Stopped, clean_environment
from stack.core.warden import FAMILY, kill_family

# A shell, its child in the same session, and one in a session of its own.
THREE = "sleep {0} & setsid sleep {0} & echo started >&2; sleep {0}"
RUNS = """
import threading
from stack.core.process import Runner, clean_environment
work = lambda: Runner().run(
    ["sh", "-c", sys.argv[1]], cwd=Path("/"), env=clean_environment(), timeout=90
)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.5)
say("ready")
time.sleep(90)
"""


def sleeping(seconds: str) -> list[psutil.Process]:
    every = psutil.process_iter(["cmdline"])
    return [one for one in every if one.info["cmdline"] == ["sleep", seconds]]


def gone(seconds: str) -> bool:
    limit = time.monotonic() + 10
    while sleeping(seconds):
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def test_kill_9_of_the_tool_leaves_nothing_running():
    tool = start(RUNS, THREE.format("61.0625"))
    read_until(tool, "ready")
    assert len(sleeping("61.0625")) == 3
    killed(tool)
    assert gone("61.0625")


def test_stop_reaches_what_left_the_session():
    runner = Runner()
    raised = []

    def work() -> None:
        words = ["sh", "-c", THREE.format("62.0625")]
        try:
            runner.run(words, cwd=Path("/"), env=clean_environment(), timeout=60)
        except Stopped as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    limit = time.monotonic() + 10
    while len(sleeping("62.0625")) < 3:
        assert time.monotonic() < limit
        time.sleep(0.02)
    runner.stop()
    thread.join(10)
    assert raised and gone("62.0625")


def test_a_family_holds_those_inside_it_and_no_other():
    def begin(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "63.0625"], env={FAMILY: name})

    inner, same, other = (begin(name) for name in ("/a/1/b", "/a/1", "/a/11"))
    kill_family("/a/1")
    assert (inner.wait(5), same.wait(5)) == (-9, -9)
    assert other.poll() is None
    other.kill()
    other.wait()
