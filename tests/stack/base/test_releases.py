# SPDX-License-Identifier: Apache-2.0
"""The pins: what is read, and which line an error points at."""

from pathlib import Path

import pytest
from sdists import FILES, pinned, write_sdist

from stack.base.download import base_of, fetch
from stack.base.pin import dependencies, release_entry
from stack.base.releases import Release, Releases, load, parse_releases
from stack.base.store import Store
from stack.core.cache import Cache
from stack.core.errors import SourceError, StackError, UsageError
from stack.core.project import Project

PINNED = ("v0.22.1", "v0.33.0")


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Three releases, the second with its tables spelled out."""
    first, second, third = (
        release_entry(pinned(write_sdist(tmp_path / f"vllm-{version}.tar.gz", FILES)))
        for version in ("9.1.0", "9.2.0", "9.10.0")
    )
    second = second.replace(
        'torch = { version = "2.11.0", file = "requirements/xpu.txt" }\n', ""
    )
    table = '[release.torch]\nversion = "2.11.0"\nfile = "requirements/xpu.txt"\n'
    return f"# pins\n\n{first}\n{second}{table}\n{third}"


def test_the_repository_pins_these_releases(real_project: Project) -> None:
    assert set(PINNED) <= set(load(real_project).names)


def test_releases_are_ordered_by_version_not_by_letters(text: str) -> None:
    assert parse_releases(text, Path("x")).names == ("v9.1.0", "v9.2.0", "v9.10.0")


@pytest.mark.parametrize(
    ("old", "new", "place", "says"),
    [
        ("revision = 1", "revision = 0", "revision = 0", ">= 1"),
        ("revision = 1", 'revision = "1"', 'revision = "1"', "Expected `int`"),
        ("revision = 1", "revisions = 1", "revisions", "unknown field `revisions`"),
        ("revision = 1\n", "", "[[release]]\n", "missing required field `revision`"),
        ('sha256 = "', 'sha256 = "X', 'sha256 = "X', "regex"),
        ('sdist = "', 'sdist = "../', 'sdist = "../', "regex"),
        ('version = "9.2.0"', 'version = "new"', 'version = "new"', "not a version"),
        ('version = "9.2.0"', 'version = "9.1.0"', "9.1.0", "must not follow v9.1.0"),
        ('version = "9.2.0"', 'version = "9.11"', "9.10.0", "must not follow v9.11"),
        ("revision = 1", "revision = ", "revision = \n", "not valid TOML"),
        ("[release.torch]", "[release.troch]", "[release.troch]", "`troch`"),
        ('xpu.txt"\n\n[[', '/x"\n\n[[', "[release.torch]", "no path inside the base"),
        ('sdist = "', 'wheel = ""\nsdist = "', "wheel", "unknown field `wheel`"),
    ],
)
def test_an_error_points_at_its_line(
    text: str, old: str, new: str, place: str, says: str
) -> None:
    second = text.index("[[release]]", text.index("[[release]]") + 1)
    broken = text[:second] + text[second:].replace(old, new, 1)
    if old.startswith("xpu.txt"):
        broken = text.replace('file = "requirements/xpu.txt"\n\n', 'file = "/x"\n\n')
    expected = broken.count("\n", 0, broken.index(place, second)) + 1
    with pytest.raises(SourceError) as caught:
        parse_releases(broken, Path("releases.toml"))
    assert caught.value.path == f"releases.toml:{expected}"
    assert says in caught.value.message
    assert caught.value.hint is not None


RETIRED = '[[retired]]\nversion = "{}"\ncommit = "{}"\n\n'
COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("entries", "line", "says"),
    [
        ([("8.1.0", COMMIT[1:])], 3, "regex"),
        ([("8.1.0", COMMIT), ("8.1.0", COMMIT)], 6, "must not follow"),
        ([("8.1.0", COMMIT), ("9.2.0", COMMIT)], 6, "pinned and retired"),
    ],
)
def test_a_retired_release_in_error_is_pointed_at(
    text: str, entries: list[tuple[str, str]], line: int, says: str
) -> None:
    old = "".join(RETIRED.format(*entry) for entry in entries)
    with pytest.raises(SourceError) as caught:
        parse_releases(old + text, Path("releases.toml"))
    assert caught.value.path == f"releases.toml:{line}"
    assert says in caught.value.message


def test_the_window_is_data(text: str) -> None:
    second = text.index("[[release]]", text.index("[[release]]") + 1)
    kept = text[:second] + text[second:].replace(
        "revision = 1", 'revision = 1\nkept = "why"', 1
    )
    for window, leaving in ((3, []), (2, ["v9.1.0"]), (1, ["v9.1.0"])):
        stack = parse_releases(f"window = {window}\n{kept}", Path("x"))
        assert [old.name for old in stack.outside_window] == leaving
    stack = parse_releases(f"window = 1\n{text}", Path("x"))
    assert [old.name for old in stack.outside_window] == ["v9.1.0", "v9.2.0"]


def test_a_word_outside_the_releases_is_pointed_at(text: str) -> None:
    with pytest.raises(SourceError) as caught:
        parse_releases('# pins\n\nrelases = "x"\n' + text, Path("releases.toml"))
    assert caught.value.path == "releases.toml:3"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"releases\.toml"):
        load(Project(tmp_path))


@pytest.mark.parametrize(
    ("asked", "near", "hint"),
    [
        ("v9.2.1", "v9.2.0", "xpustack pin 9.2.1"),
        ("9.1", "v9.1.0", "xpustack build v9.1.0 --to DIR"),
        ("v9.10", "v9.10.0", "xpustack build v9.10.0 --to DIR"),
        ("v9.10.O", "v9.10.0", "xpustack build v9.10.0 --to DIR"),
    ],
)
def test_an_unknown_release_suggests_the_nearest(
    text: str, asked: str, near: str, hint: str
) -> None:
    """A whole version may be a release to pin; half of one, or a slip, is a pin."""
    releases = parse_releases(text, Path("x"))
    with pytest.raises(UsageError) as caught:
        releases[asked]
    assert f"did you mean {near}?" in caught.value.message
    words = ["build", asked, "--to", "DIR"]
    again = caught.value.again and caught.value.again(words)
    assert (again or caught.value.hint) == hint


def test_an_unknown_word_suggests_the_list(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_releases(text, Path("x"))["attention-decode"]
    assert caught.value.hint == "xpustack status"
    assert "did you mean" not in caught.value.message


def test_a_release_is_found_with_and_without_its_v(text: str) -> None:
    releases = parse_releases(text, Path("x"))
    assert releases["9.2.0"] is releases["v9.2.0"]
    assert "v9.2.0" in releases and "v9.3.0" not in releases


def test_an_error_reads_as_one_block_and_as_data() -> None:
    error = StackError(
        "it broke", release="v1", step="s", path="f:1", detail="a\nb", hint="look"
    )
    assert str(error).splitlines() == [
        "it broke",
        "  release: v1",
        "  step: s",
        "  file: f:1",
        "  a",
        "  b",
        "  next: look",
    ]
    assert error.to_json()["detail"] == ["a", "b"]


def test_a_project_is_found_from_below_and_missed_outside(
    project: Project, tmp_path: Path
) -> None:
    below = project.root / "patches" / "v9.1.0"
    below.mkdir(parents=True)
    assert Project.find(below) == Project(project.root.resolve())
    with pytest.raises(UsageError):
        Project.find(tmp_path)


@pytest.mark.parametrize("name", PINNED)
def test_the_base_names_what_the_pin_says(
    name: str, real_project: Project, real_cache: Cache
) -> None:
    """Each version is in the file that the pin names."""
    releases: Releases = load(real_project)
    release: Release = releases[name]
    archive = fetch(release, real_cache)
    pins = (release.torch, release.triton, release.xpu_kernels)
    assert dependencies(archive, name) == pins
    store = Store(real_cache)
    base = base_of(store, release)
    for word, pin in zip(("torch", "triton", "vllm_xpu_kernels"), pins, strict=True):
        text = store.git.file(base.tree, pin.file).decode()
        lines = [line for line in text.splitlines() if word in line]
        assert any(pin.version in line for line in lines), (word, pin)
