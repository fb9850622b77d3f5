# SPDX-License-Identifier: Apache-2.0
"""Follow each hint of an error about a patch, a link or a work repository: it works."""

import json
import re
import subprocess

import pytest
from calls import Call
from fake_stack import ATTENTION, FakeStack, commit, edited, git


@pytest.mark.parametrize(
    ("slug", "before", "readable"),
    [("first", "base", 1), ("second", "first", 2), ("third", "second", 3)],
)
@pytest.mark.parametrize("fault", ["malformed", "misfit", "missing"])
def test_the_way_out_of_a_bad_patch_works(
    stack: FakeStack,
    call: Call,
    fault: str,
    slug: str,
    before: str,
    readable: int,
) -> None:
    track(stack)
    path, good = stack.patch(slug), stack.apply("good", upto=slug)
    saved = stack.contents()
    if fault == "missing":
        path.unlink()
    else:
        bad = {"malformed": (r"\n---\n", "\n"), "misfit": (r"\n-(\w+) .*", r"\n-\1 x")}
        path.write_text(re.sub(*bad[fault], path.read_text(), count=1))
    done = call("apply", "v1.0", "--offline", "--json")
    assert done.exit_code == 4, done.output
    answer = json.loads(done.stdout)
    assert len(answer["data"]["trees"]) == readable
    (error,) = answer["errors"]
    assert error["step"] == slug
    assert f"git checkout -- {path} " in error["next"]
    way_out = f"xpustack apply v1.0 --upto {before} --to DIR"
    assert way_out in error["next"], error
    work = stack.root / "again"
    words = way_out.replace("DIR", str(work)).split()[1:]
    assert call(*words, "--offline").exit_code == 0
    git(work, "fetch", "-q", str(good), "series")
    git(work, "cherry-pick", "FETCH_HEAD")
    done = call("save", work)
    assert done.exit_code == 0, done.output
    assert stack.contents() == saved


def track(stack: FakeStack) -> None:
    """Make the project a git repository that has all of its files."""
    root = stack.project.root
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "All")


def test_a_patch_that_git_never_knew_is_not_to_be_checked_out(
    stack: FakeStack, call: Call
) -> None:
    track(stack)
    order = stack.project.series_dir("v1.0") / "series"
    order.write_text(order.read_text() + "nothing-here/v1.0.patch\n")
    done = call("apply", "v1.0", "--offline")
    assert done.exit_code == 4, done.output
    assert "does not exist" in done.output and "checkout --" not in done.output
    assert f"take its line out of {order}" in done.output


def test_apply_says_which_patches_it_leaves_out(stack: FakeStack, call: Call) -> None:
    draft = stack.write("patches/draft/v1.0.patch", "not yet in the series\n")
    done = call("apply", "v1.0", "--offline")
    assert done.exit_code == 0
    assert f"no series names {draft}" in done.stderr


def test_a_step_before_a_bad_patch_can_be_applied(stack: FakeStack, call: Call) -> None:
    stack.patch("third").write_text("no mail\n")
    assert call("apply", "v1.0", "--upto", "second", "--offline").exit_code == 0
    done = call("apply", "v1.0", "--upto", "third", "--offline")
    assert done.exit_code == 4


LINKED = {
    "patch": "patches/second/v1.0.patch",
    "order": "patches/v1.0/series",
    "series": "patches/v1.0",
    "step": "patches/second",
    "patches": "patches",
    "overlay-file": "vllm_overlay/common/vllm/xpu/layer.py",
    "overlay-folder": "vllm_overlay/common/vllm/xpu",
    "common": "vllm_overlay/common",
    "overlay": "vllm_overlay",
    "kernel": "kernels/xpu_dsv4/decode.py",
    "kernel-folder": "kernels/xpu_dsv4",
    "kernels": "kernels",
}


@pytest.mark.parametrize("name", LINKED.values(), ids=LINKED)
def test_a_link_is_refused_and_the_way_out_works(
    stack: FakeStack, call: Call, name: str
) -> None:
    work = stack.apply("before")
    place, target = stack.project.root / name, stack.root / "elsewhere"
    place.rename(target)
    place.symlink_to(target)
    for words in (
        ("apply", "v1.0", "--offline"),
        ("check", "--static"),
        ("save", work),
    ):
        done = call(*words)
        assert done.exit_code == 4, (words, done.output)
        assert "link" in done.output and str(place) in done.output
    (hint,) = (
        line for line in call("save", work).stderr.splitlines() if "next: " in line
    )
    subprocess.run(hint.partition("next: ")[2], shell=True, check=True)
    assert not place.is_symlink()
    assert call("apply", "v1.0", "--offline").exit_code == 0
    assert call("check", "--static").exit_code == 0


def test_a_release_of_its_own_overlay_behind_a_link_is_refused(
    stack: FakeStack, call: Call
) -> None:
    """The common file must not silently replace a link of the release."""
    own = stack.write("vllm_overlay/v1.0/vllm/xpu/layer.py", "LAYER = 9\n")
    own.rename(stack.root / "layer.py")
    own.symlink_to(stack.root / "layer.py")
    done = call("apply", "v1.0", "--offline")
    assert done.exit_code == 4, done.output
    assert str(own) in done.output


STATES = {
    "empty": b"",
    "no-json": b"{",
    "utf16": '{"release": "v1.0"}'.encode("utf-16"),
    "latin1": b'{"release": "v\xe4"}',
    "list": b"[]",
    "deep": b"[" * 100_000,
    "release-path": b'{"release":"../../x","base":"%b","tip":"%b"}',
    "base-option": b'{"release":"v1.0","base":"--output=x","tip":"%b"}',
    "upto-path": b'{"release":"v1.0","base":"%b","tip":"%b","upto":"../x"}',
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_damaged_state_is_named_and_its_commits_can_be_saved(
    stack: FakeStack, call: Call, state: bytes
) -> None:
    work = stack.apply()
    commit(work, "fourth", {"vllm/attention.py": edited(ATTENTION, 30)})
    path = work / ".git/xpustack.json"
    path.write_bytes(state.replace(b"%b", b"0" * 40))
    before = stack.contents()
    to = ("v1.0", "--to", work, "--offline")
    for words in (("save", work), ("apply", *to), ("refresh", *to)):
        done = call(*words)
        assert done.exit_code == 2, done.output
        assert str(path) in done.output and "is damaged" in done.output
        assert f"git -C NEW fetch {work} HEAD" in done.output
    assert stack.contents() == before
    new = stack.apply("new")
    git(new, "fetch", "-q", str(work), "HEAD")
    git(new, "cherry-pick", "FETCH_HEAD")
    assert stack.save(new) == [
        "new patches/fourth/v1.0.patch",
        "changed patches/v1.0/series",
        "changed patches/v1.0/trees",
    ]


def test_a_directory_of_a_release_that_is_not_pinned_any_more(
    stack: FakeStack, call: Call
) -> None:
    work = stack.apply()
    pins = stack.project.releases_file
    pins.write_text("[[release]]" + pins.read_text().split("[[release]]")[2])
    done = call("save", work)
    assert done.exit_code == 2, done.output
    assert "not pinned any more" in done.output and str(work) in done.output


def test_a_message_in_another_encoding_is_named(stack: FakeStack, call: Call) -> None:
    work = stack.apply()
    raw = subprocess.run(
        ["git", "cat-file", "commit", "HEAD"], cwd=work, capture_output=True, check=True
    ).stdout.replace(b"Why third", b"Warum \xe4")
    commit_id = subprocess.run(
        ["git", "hash-object", "-t", "commit", "-w", "--stdin"],
        cwd=work,
        input=raw,
        capture_output=True,
        check=True,
    ).stdout.decode()
    git(work, "reset", "-q", "--hard", commit_id.strip())
    done = call("save", work)
    assert done.exit_code == 4, done.output
    assert "UTF-8" in done.output
