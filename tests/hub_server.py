"""A small server of this machine that answers as the Hugging Face hub does, with one data set or model."""

import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest


class Hub(ThreadingHTTPServer):
    """Commits of one data set or model: each is the bytes of its files by their paths; the newest is the branch main.

    Args:
        kind: "datasets" or "models"; the name is owner/name.
    """

    daemon_threads = True

    def __init__(self, kind="datasets"):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.api, self.place = f"{kind}/owner/name", ("" if kind == "models" else f"{kind}/") + "owner/name"
        self.commits, self.requests, self.token = {}, [], None
        self.fault = lambda method, path, range_: None
        self.answers_after_s = 0.0

    def commit(self, **files):
        """Adds a commit and returns its name; the keywords are paths with __ for a slash and _ for a dot."""
        content = {name.replace("__", "/").replace("_", "."): data for name, data in files.items()}
        sha = hashlib.sha1(repr((len(self.commits), sorted(content.items()))).encode()).hexdigest()
        self.commits[sha] = content
        return sha

    @property
    def main(self):
        return list(self.commits)[-1]

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # An answer goes in one packet: of two, the second would wait for the first to be confirmed.
    disable_nagle_algorithm, wbufsize = True, -1

    def _answer(self, code, content=b"", **headers):
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, value):
        self._answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def _files(self, revision):
        return self.server.commits.get(self.server.main if revision == "main" else unquote(revision))

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url, range_ = urlsplit(self.path), self.headers.get("Range") or ""
        path = unquote(url.path)
        self.server.requests.append((self.command, path, range_))
        fault = self.server.fault(self.command, path, range_)
        if fault:
            self._answer(fault)
        elif self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._answer(401, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        elif found := re.fullmatch(rf"/api/{self.server.api}(?:/revision/([^/]+))?", path):
            self._info(found[1] or "main")
        elif found := re.fullmatch(rf"/api/{self.server.api}/(tree|paths-info)/([^/]+)/?(.*)", path):
            is_deep = parse_qs(url.query).get("recursive", ["False"])[0].lower() == "true"
            asked = parse_qs(body.decode()).get("paths", []) if found[1] == "paths-info" else found[3]
            self._list(self._files(found[2]), asked, is_deep)
        elif found := re.fullmatch(rf"/{self.server.place}/resolve/([^/]+)/(.*)", path):
            self._content((self._files(found[1]) or {}).get(found[2]), found[1], range_)
        else:
            self._answer(404, b"{}", X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")

    do_POST = do_HEAD = do_GET

    def _info(self, revision):
        if self._files(revision) is None:
            self._answer(404, b"{}", X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
            return
        sha = self.server.main if revision == "main" else revision
        siblings = [{"rfilename": path, "size": len(data)} for path, data in self._files(sha).items()]
        self._json({"id": "owner/name", "sha": sha, "private": False, "tags": [], "siblings": siblings})

    def _list(self, files, asked, is_deep):
        entries = {}
        for path, data in files.items():
            entries[path] = {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for at in (at for at, char in enumerate(path) if char == "/"):
                entries[path[:at]] = {"type": "directory", "path": path[:at], "oid": "0" * 40}
        if isinstance(asked, list):
            self._json([entries[path] for path in asked if path in entries])
            return
        inside = f"{asked}/" if asked else ""
        found = [entry for path, entry in entries.items() if path.startswith(inside)]
        self._json([entry for entry in found if is_deep or "/" not in entry["path"][len(inside) :]])

    def _content(self, data, revision, range_):
        if data is None:
            self._answer(404, b"", X_Error_Code="EntryNotFound", X_Error_Message="Entry not found")
            return
        time.sleep(self.server.answers_after_s)
        commit = self.server.main if revision == "main" else revision
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X_Repo_Commit": commit, "Accept_Ranges": "bytes"}
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", range_):
            first, last = int(found[1]), min(int(found[2] or len(data)), len(data) - 1)
            headers["Content_Range"] = f"bytes {first}-{last}/{len(data)}"
            self._answer(206, data[first : last + 1], **headers)
        else:
            self._answer(200, data, **headers)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    """The server, which huggingface_hub takes for the hub; waits are short."""
    constants = pytest.importorskip("huggingface_hub.constants")
    from huggingface_hub import HfFileSystem

    from sppo_jax.data.storage import remote

    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    # HF_ENDPOINT is read only where the library is imported.
    here = server.url
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, here)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", here)
    monkeypatch.setattr(remote, "_FIRST_WAIT_S", 0.02)
    HfFileSystem.clear_instance_cache()
    yield server
    HfFileSystem.clear_instance_cache()
    server.shutdown()
    server.server_close()


@pytest.fixture
def model_hub():
    """The server with a model, for processes that start with HF_ENDPOINT."""
    server = Hub("models")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
