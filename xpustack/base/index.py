# SPDX-License-Identifier: Apache-2.0
"""Searches for archives exactly where this machine's pip would search.

unearth implements the index protocols but reads no configuration, and pip cannot
download a source archive without running its set-up code. So this module asks pip
for its configuration and sets unearth up with it.
"""

import ast
import os
import shlex
import ssl
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httpx2
from packaging.version import Version
from unearth import Link, Package, PackageFinder
from unearth.auth import MultiDomainBasicAuth
from unearth.fetchers import Fetcher
from unearth.fetchers.sync import PyPIClient

from xpustack.core.errors import EnvironmentProblem

PROJECT = "vllm"
_SOURCES = (":env:", "download", "global")


@dataclass(frozen=True)
class PipConfiguration:
    """The settings of `pip download` that decide where and how it searches.

    `timeout` is in seconds. An empty `index_url` means pip's own default.
    """

    index_url: str = ""
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    no_index: bool = False
    cert: str = ""
    client_cert: str = ""
    proxy: str = ""
    timeout: float = 15.0

    @classmethod
    def from_listing(cls, listing: str) -> "PipConfiguration":
        """Parse the output of `pip config list`, which includes PIP_* variables.
        They override `[download]`, which overrides `[global]`."""
        settings: dict[tuple[str, str], str] = {}
        for line in listing.splitlines():
            name, equals, value = line.partition("=")
            section, _, key = name.strip().rpartition(".")
            if equals and section in _SOURCES:
                settings[section, key.removeprefix("default-")] = str(
                    ast.literal_eval(value)
                )

        def setting(key: str) -> str:
            values = (settings.get((section, key)) for section in _SOURCES)
            return next((value for value in values if value), "")

        return cls(
            index_url=setting("index-url"),
            extra_index_urls=tuple(setting("extra-index-url").split()),
            find_links=tuple(setting("find-links").split()),
            trusted_hosts=tuple(setting("trusted-host").split()),
            no_index=setting("no-index").lower() in ("1", "true", "yes", "on"),
            cert=setting("cert"),
            client_cert=setting("client-cert"),
            proxy=setting("proxy"),
            timeout=float(setting("timeout") or cls.timeout),
        )

    @classmethod
    def of_this_machine(
        cls, environment: Mapping[str, str] | None = None
    ) -> "PipConfiguration":
        """Ask the pip of the running interpreter.

        Raises:
            EnvironmentProblem: this interpreter has no working pip.
        """
        command = [sys.executable, "-m", "pip", "config", "list"]
        process = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False
        )
        if process.returncode != 0:
            raise EnvironmentProblem(
                "pip cannot list its configuration",
                detail=process.stderr,
                hint=shlex.join(command),
            )
        return cls.from_listing(process.stdout)

    def index(self) -> "Index":
        """The indexes and find-links, ready to be searched."""
        urls = [] if self.no_index else [self._main_index, *self.extra_index_urls]
        client = PyPIClient(
            trusted_hosts=self.trusted_hosts,
            verify=self._tls(),
            timeout=self.timeout,
            proxy=self.proxy or None,
            follow_redirects=True,
        )
        client.auth = MultiDomainBasicAuth(prompting=False, index_urls=urls)
        finder = PackageFinder(
            # mypy: unearth's own client does not match the protocol it declares.
            cast(Fetcher, client),
            index_urls=urls,
            find_links=[place for place in self.find_links if _exists(place)],
            trusted_hosts=self.trusted_hosts,
            ignore_compatibility=True,
            no_binary=[PROJECT],
        )
        return Index(finder, client)

    def _tls(self) -> ssl.SSLContext | bool:
        if not self.cert and not self.client_cert:
            return True
        folder = os.path.isdir(self.cert)
        context = ssl.create_default_context(
            cafile=None if folder else self.cert or None,
            capath=self.cert if folder else None,
        )
        if self.client_cert:
            context.load_cert_chain(self.client_cert)
        return context

    @property
    def _main_index(self) -> str:
        # unearth falls back to the index that is also pip's default.
        return self.index_url or str(PackageFinder().sources[0]["url"])


@dataclass(frozen=True)
class Index:
    """Every index that pip would search, and the HTTP client to use."""

    finder: PackageFinder
    client: httpx2.Client

    def archives(self, version: str | None = None) -> list[Package]:
        """vLLM's source archives, newest first, of all versions or of one. Yanked
        archives are included, because a pin must stay reachable.

        Raises:
            EnvironmentProblem: an index cannot be reached.
        """
        requirement = PROJECT if version is None else f"{PROJECT}=={version}"
        return [
            package
            for package in self.packages(requirement)
            if package.link.filename.endswith(".tar.gz")
        ]

    def final_versions(self, project: str) -> list[Version]:
        """The final versions of a project that are not yanked, oldest first; none if
        no index has the project.

        Raises:
            EnvironmentProblem: an index cannot be reached.
        """
        offered = {
            Version(package.version or "0")
            for package in self.packages(project)
            if not package.link.is_yanked
        }
        return sorted(version for version in offered if not version.is_prerelease)

    def packages(self, requirement: str) -> list[Package]:
        """Every file of a requirement, yanked ones and pre-releases included."""
        try:
            return list(
                self.finder.find_matches(
                    requirement, allow_yanked=True, allow_prereleases=True
                )
            )
        except httpx2.HTTPError as error:
            raise EnvironmentProblem(
                "cannot reach the package index",
                detail=str(error),
                hint="python -m pip config list",
            ) from error


def link_label(link: Link) -> str:
    """The link for messages: its file name and host, without credentials."""
    host = urlsplit(link.redacted).hostname
    return f"{link.filename} from {host or link.redacted}"


def _exists(place: str) -> bool:
    return "://" in place or os.path.exists(place)
