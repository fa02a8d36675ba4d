"""A small hub on loopback: what huggingface_hub and datasets ask for when they resolve an id and download its files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

MODELS, DATASETS = "models", "datasets"


def commit_of(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


class FakeHub:
    """Repositories by ("models", "org/name"): files by name, and commits by revision. `asked` has every request."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.revisions: dict[tuple[str, str], dict[str, str]] = {}
        self.gated: set[str] = set()
        self.asked: list[str] = []
        self.url = ""

    def add(self, kind: str, name: str, files: dict[str, bytes], **revisions: str) -> str:
        """The commit of `main`."""
        commit = commit_of(name)
        self.files[kind, name] = files
        found = {"main": commit, **revisions}
        self.revisions[kind, name] = found | {commit: commit for commit in found.values()}
        return commit

    def add_folder(self, name: str, folder: Path, **more: bytes) -> str:
        files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        return self.add(MODELS, name, files | {key.replace("__", "."): value for key, value in more.items()})

    def downloads(self) -> list[str]:
        """Names of the files that were downloaded."""
        return sorted(line.rpartition("/")[2] for line in self.asked if line.startswith("GET") and "/resolve/" in line)


@contextmanager
def serving() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            parts = path.strip("/").split("/")
            if parts[0] == "api":
                self._api(parts[1], "/".join(parts[2:4]), parts[4:])
            elif "resolve" in parts:
                at = parts.index("resolve")
                kind = DATASETS if parts[0] == DATASETS else MODELS
                self._file(kind, "/".join(parts[at - 2 : at]), parts[at + 1], "/".join(parts[at + 2 :]))
            else:
                self._say(404, b"{}")

        def _commit(self, kind: str, name: str, revision: str) -> str | None:
            if (kind, name) not in hub.files:
                self._say(401, b"{}", **{"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
                return None
            if name in hub.gated:
                self._say(403, b"{}", **{"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
                return None
            commit = hub.revisions[kind, name].get(revision)
            if commit is None:
                self._say(404, b"{}", **{"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no such revision"})
            return commit

        def _api(self, kind: str, name: str, rest: list[str]) -> None:
            action, revision = (rest[0], rest[1]) if len(rest) > 1 else ("revision", "main")
            commit = self._commit(kind, name, revision)
            if commit is None:
                return
            files = hub.files[kind, name]
            if action == "revision":
                about = {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files], "tags": []}
                self._json({**about, "private": False, "disabled": False, "downloads": 0, "likes": 0})
            elif action == "tree":
                self._json(_entries(files, "/".join(rest[2:])))
            elif action == "paths-info":
                form = json.loads(self._body) if self._body[:1] == b"{" else _form(self._body)
                self._json(
                    [entry for path in form["paths"] for entry in _entries(files, None) if entry["path"] == path]
                )
            else:
                self._say(404, b"{}")

        def _file(self, kind: str, name: str, revision: str, file: str) -> None:
            commit = self._commit(kind, name, revision)
            if commit is None:
                return
            content = hub.files[kind, name].get(file)
            if content is None:
                headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit, "X-Error-Message": "no such file"}
                self._say(404, b"", **headers)
            else:
                self._say(200, content, **{"ETag": f'"{_digest(content)}"', "X-Repo-Commit": commit})

        def _json(self, value: object) -> None:
            self._say(200, json.dumps(value).encode())

        def _say(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entries(files: dict[str, bytes], below: str | None) -> list[dict[str, object]]:
    """All files, and the folders they are in."""
    folders = {str(parent) for file in files for parent in Path(file).parents if str(parent) != "."}
    found: list[dict[str, object]] = [
        {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in sorted(folders)
    ]
    found += [
        {"type": "file", "path": file, "oid": _digest(content), "size": len(content)} for file, content in files.items()
    ]
    return [entry for entry in found if not below or str(entry["path"]).startswith(f"{below}/")]


def _form(body: bytes) -> dict[str, list[str]]:
    from urllib.parse import parse_qs

    return parse_qs(body.decode())
