"""A Hugging Face hub on this machine: what `huggingface_hub` asks of it to fetch a model and to write one, and no more."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest


class FakeHub:
    """Repositories by name, each a list of commits, the last of which is `main`. A commit is a directory of files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self.repositories: dict[str, dict[str, Path]] = {}
        #: Files that were fetched, and those that were written, by their path.
        self.fetched: list[str] = []
        self.written: dict[str, bytes] = {}
        #: Seconds before each answer.
        self.delay_s = 0.0
        hub = self

        class Handler(_Handler):
            of = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        constants = "huggingface_hub.constants."
        monkeypatch.setattr(f"{constants}ENDPOINT", self.url)
        monkeypatch.setattr(f"{constants}HUGGINGFACE_CO_URL_TEMPLATE", self.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(f"{constants}HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(f"{constants}HF_HUB_OFFLINE", False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit(self, repository: str, directory: Path) -> str:
        """Put the files of `directory` on top of a repository, and return the commit."""
        commits = self.repositories.setdefault(repository, {})
        sha = hashlib.sha1(f"{repository} {len(commits)}".encode()).hexdigest()
        commits[sha] = directory
        return sha

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes, Mapping[str, str]]:
        parts = path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "repos"]:
            return _json({"url": f"{self.url}/org/name"})
        if parts[:2] == ["api", "validate-yaml"]:  # the head of a model card
            return _json({"errors": [], "warnings": []})
        if parts[:2] == ["api", "models"]:
            return self._api("/".join(parts[2:4]), parts[4:], body)
        if parts[2:3] == ["resolve"]:
            repository, sha, name = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
            file = self.repositories[repository][sha] / name
            if not file.is_file():
                return 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}
            content = file.read_bytes()
            self.fetched += [name] if method == "GET" else []
            return 200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        return 404, b"", {}

    def _api(self, repository: str, rest: list[str], body: bytes) -> tuple[int, bytes, Mapping[str, str]]:
        if rest[:1] == ["preupload"]:
            files = json.loads(body)["files"]
            return _json({"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]})
        if rest[:1] == ["commit"]:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.written[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return _json({"commitUrl": f"{self.url}/{repository}/commit/1", "commitOid": "1", "pullRequestUrl": None})
        commits = self.repositories.get(repository)
        if commits is None:
            return 404, b"{}", {"X-Error-Code": "RepoNotFound"}
        wanted = rest[1] if len(rest) > 1 and rest[1] != "main" else list(commits)[-1]
        if wanted not in commits:
            return 404, b"{}", {"X-Error-Code": "RevisionNotFound"}
        files = sorted(path for path in commits[wanted].rglob("*") if path.is_file())
        names = {str(path.relative_to(commits[wanted])): path for path in files}
        if rest[:1] == ["tree"]:
            return _json([{"type": "file", "oid": "0" * 40, "size": path.stat().st_size, "path": name} for name, path in names.items()])
        return _json({"id": repository, "sha": wanted, "siblings": [{"rfilename": name} for name in names], "tags": [], "private": False})


def _json(value: Any) -> tuple[int, bytes, Mapping[str, str]]:
    return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}


class _Handler(BaseHTTPRequestHandler):
    of: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        time.sleep(self.of.delay_s)
        code, content, headers = self.of.answer(self.command, self.path, body)
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(BrokenPipeError):  # a client that waited no longer
                self.wfile.write(content)

    do_HEAD = do_GET = do_POST = _answer  # noqa: N815  (http.server names them)
