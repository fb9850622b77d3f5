# SPDX-License-Identifier: Apache-2.0
"""The server that forks: nothing leaks from one run to the next, and whatever a run
does to itself or to the server fails only that run."""

import concurrent.futures
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from children import ended, ends

from stack.core.errors import CheckFailed, EnvironmentProblem
from stack.core.process import Completed, Runner, Stopped, clean_environment
from stack.forks import program as fork_program
from stack.forks import server as fork_server
from stack.forks.server import Ahead, ProgramExit, Server
from stack.steptest.server import ENVIRONMENT, PRELOADED

PYTEST = ("pytest",)
PLANTS = """
import builtins, importlib.metadata, os, random, signal, sys, tempfile, warnings
import numpy, torch

def test_plant(tmp_path):
    import vllm
    sys.modules["planted"] = sys.modules["os"]
    sys.path.insert(0, str(tmp_path))
    os.environ["PLANTED"] = os.environ["VLLM_PLANTED"] = "1"
    os.chdir(tmp_path)
    os.umask(0o077)
    builtins.planted = 1
    tempfile.tempdir = str(tmp_path)
    torch.planted = torch.add
    torch.add = torch.mul
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    numpy.random.seed(7)
    random.seed(7)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.simplefilter("error")
    importlib.metadata.distribution("pytest")
    open(tempfile.gettempdir() + "/planted", "w").close()
"""
LOOKS = """
import builtins, os, random, signal, sys, tempfile, warnings
from importlib import metadata
from pathlib import Path
import numpy, torch

def test_look():
    import vllm
    assert vllm.NAME == "second"
    assert "planted" not in sys.modules
    assert not any("first" in place for place in sys.path)
    assert not {"PLANTED", "VLLM_PLANTED"} & set(os.environ)
    assert os.environ["WHO"] == "second"
    assert Path.cwd().parts[-2:] == ("second", "tests")
    assert os.umask(0o022) == 0o022
    assert not hasattr(builtins, "planted") and not hasattr(torch, "planted")
    assert torch.add(torch.ones(1), 1).item() == 2
    assert torch.get_default_dtype() == torch.float32
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert Path(tempfile.gettempdir()).name == "second"
    assert not Path(tempfile.gettempdir(), "planted").exists()
    assert [e.name for e in metadata.entry_points(group="seen.here")] == ["second"]
    assert not any("xpustack" in Path(place).parts[-1:] for place in sys.path)
    files = [str(file.resolve()) for file in Path("/proc/self/fd").iterdir()]
    assert not any("socket:" in file or "pipe:" in file for file in files), files
    drawn = random.random(), numpy.random.random(), torch.initial_seed()
    print(*drawn, file=open("drawn", "w"))
"""


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server(Runner(), PYTEST, ENVIRONMENT)) as server:
        yield server


def run(
    server: Server,
    home: Path,
    source: str,
    limit: float = 60.0,
    ahead: Ahead | None = None,
) -> tuple[ProgramExit, str]:
    """Run `source` as a test module in `home`, which gets a vllm of that name; return
    pytest's exit and its output. Runs with imports `ahead` see those of the folder
    `shared` beside it."""
    site = home / "site"
    (home / "tests").mkdir(parents=True)
    (home / "tests/test_it.py").write_text(source)
    (site / "vllm").mkdir(parents=True)
    (site / "vllm/__init__.py").write_text(f"NAME = {home.name!r}\n")
    (site / "seen-1.dist-info").mkdir()
    (site / "seen-1.dist-info/METADATA").write_text("Name: seen\nVersion: 1\n")
    points = f"[seen.here]\n{home.name} = vllm\n"
    (site / "seen-1.dist-info/entry_points.txt").write_text(points)
    pytest_exit = server.run(
        ["pytest", "-p", "no:cacheprovider", "-q", "test_it.py"],
        cwd=home / "tests",
        path=[home.parent / "shared"] if ahead else [site],
        env=clean_environment(**ENVIRONMENT, TMPDIR=str(home), WHO=home.name),
        output=home / "output.txt",
        limit=limit,
        ahead=ahead,
    )
    return pytest_exit, (home / "output.txt").read_text()


def test_nothing_passes_from_a_run_to_the_next(tmp_path):
    preloaded = ("numpy", "torch", "pytest")
    with closing(Server(Runner(), preloaded, ENVIRONMENT)) as server:
        done, printed = run(server, tmp_path / "first", PLANTS)
        assert done.status == 0, printed
        drawn = set()
        for folder in ("a", "b"):
            home = tmp_path / folder / "second"
            done, printed = run(server, home, LOOKS)
            assert done.status == 0, printed
            drawn |= set((home / "tests/drawn").read_text().split())
        assert len(drawn) == 6, "two runs drew the same random numbers"


def test_a_run_sees_what_a_new_process_would(server, tmp_path):
    """But for the modules that were imported ahead."""
    source = (
        "import json, os, signal, sys\n\ndef test_it():\n"
        "    signals = [str(signal.getsignal(n)) for n in (1, 2, 13, 15, 17)]\n"
        "    seen = [sys.path, sys.argv[1:], dict(os.environ), signals,\n"
        "        os.getsid(0) == os.getpid(), list(sys.flags),\n"
        "        sys.modules['__main__'].__spec__.name]\n"
        "    json.dump(seen, open(sys.argv[-1] + '.json', 'w'))\n"
    )
    run(server, tmp_path / "a", source)
    warm = (tmp_path / "a/tests/test_it.py.json").read_text()
    home = tmp_path / "a"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "test_it.py"],
        cwd=home / "tests",
        env=server._runner.marked(
            clean_environment(
                **ENVIRONMENT,
                TMPDIR=str(home),
                WHO="a",
                PYTHONPATH=str(home / "site"),
            )
        ),
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    cold = (home / "tests/test_it.py.json").read_text()
    site = f', "PYTHONPATH": "{home / "site"}"'
    assert warm == cold.replace(site, "")


@pytest.mark.parametrize(
    ("act", "status"),
    [
        ("os.kill(os.getpid(), 9)", -9),
        ("ctypes.string_at(0)", -11),
        ("os._exit(3)", 3),
        ("os.abort()", -6),
    ],
)
def test_a_run_that_crashes_ends_alone(server, tmp_path, act, status):
    source = f"import ctypes, os\n\ndef test_it():\n    {act}\n"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        slow = "import time\n\ndef test_it():\n    time.sleep(1)\n"
        other = pool.submit(run, server, tmp_path / "other", slow)
        done, _ = run(server, tmp_path / "crash", source)
        assert (done.status, done.late) == (status, False)
        assert other.result()[0].status == 0


def test_a_run_that_hangs_is_killed_with_its_children(server, tmp_path):
    source = (
        "import os, subprocess, time\n\ndef test_it():\n"
        "    subprocess.Popen(['sleep', '64.0625'])\n"
        "    time.sleep(60)\n"
    )
    begin = time.monotonic()
    done, _ = run(server, tmp_path / "a", source, limit=1.0)
    assert done.late and done.status == -9
    assert time.monotonic() - begin < 10
    running = psutil.process_iter(["cmdline"])
    assert all(one.info["cmdline"] != ["sleep", "64.0625"] for one in running)


KILLS = """
import os, pathlib, signal, subprocess, time

def test_it():
    child = subprocess.Popen(["sleep", "60"])
    pathlib.Path("../child").write_text(str(child.pid))
    status = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text()
    os.kill(int(status.rpartition(")")[2].split()[1]), signal.SIGKILL)
    time.sleep(60)
"""


def test_a_server_that_dies_is_a_problem_of_the_machine_and_leaves_no_process(
    server, tmp_path
):
    killed = r"the fork server was killed by signal 9 \(SIGKILL\)"
    with pytest.raises(EnvironmentProblem, match=killed):
        run(server, tmp_path / "a", KILLS)
    assert ends(int((tmp_path / "a/child").read_text()))
    with pytest.raises(EnvironmentProblem, match=killed):
        run(server, tmp_path / "b", "def test_it(): pass\n")


def test_no_process_for_a_run_is_a_problem_of_the_machine(tmp_path):
    (tmp_path / "forkless.py").write_text(
        "import os\ndef fork(): raise BlockingIOError(11, 'no process')\n"
        "os.fork = fork\n"
    )
    variables = {"PYTHONPATH": str(tmp_path)}
    with (
        closing(Server(Runner(), ("forkless",), variables)) as server,
        pytest.raises(EnvironmentProblem, match="gave no answer") as caught,
    ):
        run(server, tmp_path / "a", "def test_it(): pass\n")
    assert "BlockingIOError: [Errno 11] no process" in caught.value.detail


def test_a_server_with_a_second_thread_does_not_fork(tmp_path):
    (tmp_path / "threading_at_import.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    preloaded, variables = ("threading_at_import",), {"PYTHONPATH": str(tmp_path)}
    with (
        closing(Server(Runner(), preloaded, variables)) as server,
        pytest.raises(EnvironmentProblem, match="has 2 threads"),
    ):
        server.start()
        run(server, tmp_path / "a", "def test_it(): pass\n")


@pytest.mark.parametrize("wanted", [True, False])
def test_a_server_that_starts_early_serves_and_ends(tmp_path, wanted):
    (tmp_path / "noting.py").write_text(
        "import os, pathlib\n"
        "with pathlib.Path(__file__).with_name('note').open('a') as note:\n"
        "    print(os.getpid(), file=note)\n"
    )
    note, variables = tmp_path / "note", {"PYTHONPATH": str(tmp_path)}
    with closing(Server(Runner(), ("noting", "pytest"), variables)) as server:
        server.start()
        server.start()
        if wanted:
            assert run(server, tmp_path / "a", "def test_it(): pass\n")[0].status == 0
        while not (note.exists() and note.read_text().endswith("\n")):
            time.sleep(0.01)
    (process,) = note.read_text().split()
    assert ended(int(process))


def test_stop_ends_a_run_and_its_server(tmp_path):
    runner = Runner()
    source = (
        "import os, pathlib, time\n\ndef test_it():\n"
        "    pathlib.Path('../pids').write_text(f'{os.getpid()} {os.getppid()}.')\n"
        "    time.sleep(60)\n"
    )
    note = tmp_path / "a/pids"
    with (
        concurrent.futures.ThreadPoolExecutor() as pool,
        closing(Server(runner, PYTEST)) as server,
    ):
        future = pool.submit(run, server, tmp_path / "a", source)
        while not (note.exists() and note.read_text().endswith(".")):
            time.sleep(0.02)
        runner.stop()
        with pytest.raises(Stopped):
            future.result(20)
        with pytest.raises(Stopped):
            run(server, tmp_path / "b", source)
    assert all(ends(int(process)) for process in note.read_text()[:-1].split())


SHARED = """
import os, sys
from pathlib import Path

os.environ["SET_BY_IMPORT"] = "1"
sys.path.append("appended by import")
with open(Path(__file__).with_name("log"), "a") as log:
    print(os.getpid(), os.environ["WHO"], file=log)
"""
USES = """
import os, sys, time, shared
from pathlib import Path

def test_it():
    who = Path.cwd().parent.name
    assert os.environ["SET_BY_IMPORT"] == "1" and os.environ["WHO"] == who
    assert "appended by import" in sys.path and sys.path[0] == str(Path.cwd())
    assert not hasattr(shared, "seen")
    shared.seen = True
    files = [str(file.resolve()) for file in Path("/proc/self/fd").iterdir()]
    assert not any("socket:" in file or "pipe:" in file for file in files), files
    if who == "crashing":
        os.abort()
    if who == "hanging":
        time.sleep(60)
"""


def shared_site(folder: Path, source: str) -> tuple[Path, Ahead]:
    """What the module `shared` writes, and the wish to import it ahead."""
    (folder / "shared").mkdir(parents=True)
    (folder / "shared/shared.py").write_text(source)
    variables = clean_environment(**ENVIRONMENT, WHO="nobody", TMPDIR=str(folder))
    return folder / "shared/log", Ahead(["shared"], variables)


def test_runs_share_an_import_and_nothing_else(server, tmp_path):
    log, ahead = shared_site(tmp_path, SHARED + "import time; time.sleep(0.5)\n")
    names = ("a", "b", "crashing", "hanging")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(run, server, tmp_path / name, USES, limit, ahead)
            for name, limit in zip(names, (60.0, 60.0, 60.0, 2.0), strict=True)
        ]
        done = [future.result() for future in runs]
    assert [one.status for one, _ in done] == [0, 0, -6, -9], done
    assert done[-1][0].late
    (imported,) = log.read_text().splitlines()
    process, who = imported.split()
    assert who == "nobody"
    assert not ended(int(process))
    server.close()
    # Its process ends on its own, once the first one has ended.
    assert ends(int(process))


@pytest.mark.parametrize(
    "fault",
    [
        "raise ImportError('broken')",
        "os.kill(os.getpid(), 9)",
        "import time; time.sleep(60)",
        "import threading, time;"
        " threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    ],
)
def test_a_shared_import_that_fails_leaves_the_run_alone(tmp_path, monkeypatch, fault):
    program = tmp_path / "program.py"
    text = Path(fork_program.__file__).read_text()
    program.write_text(text.replace("AHEAD_LIMIT = 60\n", "AHEAD_LIMIT = 2\n"))
    monkeypatch.setattr(fork_program, "__file__", str(program))
    source = f"import os\nif os.environ['WHO'] == 'nobody':\n    {fault}\n"
    _, ahead = shared_site(tmp_path, source)
    uses = "import shared\n\ndef test_it(): pass\n"
    with closing(Server(Runner(), PYTEST)) as server:
        done, printed = run(server, tmp_path / "a", uses, ahead=ahead)
    assert (done.status, done.late) == (0, False), printed


def test_a_run_whose_shared_import_is_lost_begins_again(server, tmp_path):
    log, ahead = shared_site(tmp_path, SHARED)
    kills = f"""
import os, pathlib, time

def test_it():
    process, _ = pathlib.Path({str(log)!r}).read_text().split()
    if "SET_BY_IMPORT" in os.environ:
        os.kill(int(process), 9)
        time.sleep(60)
"""
    done, printed = run(server, tmp_path / "a", kills, ahead=ahead)
    assert done.status == 0, printed


def test_a_run_that_nobody_could_kill_does_not_begin_again(
    server, tmp_path, monkeypatch
):
    """Its process may be waiting for a disk, and still be there."""
    monkeypatch.setattr(fork_server, "GRACE", 0.0)
    _, ahead = shared_site(tmp_path, SHARED)
    begun = tmp_path / "begun"
    hangs = f"""
import time

def test_it():
    with open({str(begun)!r}, "a") as file:
        file.write("x")
    time.sleep(60)
"""
    with pytest.raises(EnvironmentProblem):
        run(server, tmp_path / "a", hangs, ahead=ahead, limit=10)
    assert begun.read_text() == "x"


def test_few_shared_imports_are_kept(server, tmp_path):
    logs = []
    for number in range(fork_server.KEPT + 2):
        log, ahead = shared_site(tmp_path / str(number), SHARED)
        logs.append(log)
        run(server, tmp_path / f"{number}/run", "def test_it(): pass\n", ahead=ahead)
    first, second, *others = (int(log.read_text().split()[0]) for log in logs)
    assert ends(first) and ends(second)
    assert not any(ended(process) for process in others)


SCRIPT = """
import sys
print(*sys.argv, __name__, sys.path[0])
sys.exit({end!r})
"""


def complete(server: Server, home: Path, source: str, limit: float) -> Completed:
    """Run a script to its end in the folder `home`."""
    home.mkdir(exist_ok=True)
    (home / "one.py").write_text(source)
    return server.complete(
        ["one.py"],
        cwd=home,
        env=clean_environment(),
        output=home / "output.txt",
        limit=limit,
    )


def test_a_program_that_ran_is_completed_with_what_it_printed(server, tmp_path):
    done = complete(
        server, tmp_path / "a", "print('said'); raise SystemExit('why')", 60.0
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "said\nwhy\n", "")


def test_a_program_that_hangs_did_not_pass(server, tmp_path):
    source = "print('here', flush=True)\nimport time; time.sleep(60)\n"
    with pytest.raises(CheckFailed, match="killed after 1 s") as caught:
        complete(server, tmp_path / "a", source, 1.0)
    assert caught.value.detail == ("here",)


@pytest.mark.parametrize(
    ("end", "status"), [(None, 0), (3, 3), ("a sentence", 1), (True, 1)]
)
def test_a_script_runs_as_by_itself(server, tmp_path, end, status):
    script = tmp_path / "scripts/one.py"
    script.parent.mkdir()
    script.write_text(SCRIPT.format(end=end))
    output, words = tmp_path / "output.txt", ["scripts/one.py", "a", "b"]
    environment = clean_environment()
    done = server.run(
        words, cwd=tmp_path, path=[], env=environment, output=output, limit=60.0
    )
    alone = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert (done.status, alone.returncode) == (status, status)
    assert output.read_text() == alone.stdout


def test_all_that_is_imported_ahead_exists_and_starts_no_thread(tmp_path):
    source = (
        f"import sys\n\ndef test_it(): assert {set(PRELOADED)} <= {{*sys.modules}}\n"
    )
    with closing(Server(Runner(), PRELOADED, ENVIRONMENT)) as server:
        done, printed = run(server, tmp_path / "a", source)
    assert done.status == 0, printed
