"""An S3 server on loopback (moto), behind a proxy that fails, stalls and cuts answers as a test asks."""

import contextlib
import http.client
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

ACCESS_KEY, SECRET_KEY = "AKIAEXAMPLEEXAMPLE", "a-secret-of-the-tests"


# How a service answers where the bucket lies in another region.
_ELSEWHERE = {"moved": (301, "PermanentRedirect"), "malformed": (400, "AuthorizationHeaderMalformed")}


class Proxy(ThreadingHTTPServer):
    """Hands requests on; `fault` is asked about each: None, "fail", "stall", "cut", "deny", "moved" or "malformed"."""

    daemon_threads = True

    def __init__(self, port):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind, self.requests = port, []
        self.fault: Callable[[str, str, str], str | None] = lambda method, path, range_: None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # An answer goes in one packet: of two, the second would wait for the first to be confirmed.
    disable_nagle_algorithm, wbufsize = True, -1

    def handle_expect_100(self):
        goes_on = super().handle_expect_100()
        self.wfile.flush()
        return goes_on

    def _hand_on(self):
        body = self._body()
        range_ = self.headers.get("Range") or ""
        self.server.requests.append((self.command, self.path, range_))
        fault = self.server.fault(self.command, self.path, range_)
        if fault == "stall":
            time.sleep(0.8)
            self.close_connection = True
            return
        if fault in _ELSEWHERE:
            code, told = _ELSEWHERE[fault]
            content = b"" if self.command == "HEAD" else f"<Error><Code>{told}</Code></Error>".encode()
            self.send_response(code)
            self.send_header("x-amz-bucket-region", "eu-west-1")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            return
        if fault in ("fail", "deny"):
            self.send_response(503 if fault == "fail" else 403)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        there = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=30)
        headers = {
            name: value for name, value in self.headers.items() if name.lower() not in ("expect", "content-length")
        }
        there.request(
            self.command, self.path, body or None, headers | ({"Content-Length": str(len(body))} if body else {})
        )
        answer = there.getresponse()
        content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                self.send_header(name, value)
        size = answer.headers.get("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", size or "0")
        self.end_headers()
        if fault == "cut":
            content, self.close_connection = content[: len(content) // 2], True
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(content)
        there.close()

    def _body(self):
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        blocks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            blocks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        del self.headers["Transfer-Encoding"]
        return b"".join(blocks)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _hand_on

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def s3_server():
    """The proxy, and a file system that writes to the server without it."""
    server = pytest.importorskip("moto.server")
    fs = pytest.importorskip("pyarrow.fs")
    moto = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    port = moto._server.server_port
    proxy = Proxy(port)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    proxy.direct = fs.S3FileSystem(
        access_key=ACCESS_KEY, secret_key=SECRET_KEY, region="us-east-1", scheme="http",
        endpoint_override=f"127.0.0.1:{port}", allow_bucket_creation=True, allow_bucket_deletion=True,
    )  # fmt: skip
    yield proxy
    proxy.shutdown()
    proxy.server_close()
    moto.stop()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """The server with an empty bucket named `data`; waits are short."""
    from sppo_jax.data.storage import places, remote

    for name, value in environment(s3_server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(places, "_TRIES_S", 0.4)
    monkeypatch.setattr(remote, "_FIRST_WAIT_S", 0.02)
    places._s3.cache_clear()
    s3_server.fault = lambda method, path, range_: None
    with contextlib.suppress(OSError):
        s3_server.direct.delete_dir("data")
    s3_server.direct.create_dir("data")
    s3_server.requests.clear()
    yield s3_server
    places._s3.cache_clear()


def environment(server):
    """The variables by which a process finds the server."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REGION": "us-east-1",
    }


def upload(server, folder, to):
    """Copies a file or a folder of this machine into the server."""
    from pyarrow import fs

    if folder.is_dir():
        fs.copy_files(str(folder), to, source_filesystem=fs.LocalFileSystem(), destination_filesystem=server.direct)
    else:
        with server.direct.open_output_stream(to, compression=None) as file:
            file.write(folder.read_bytes())
