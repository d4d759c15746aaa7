"""A Google Cloud Storage of the tests' own, on loopback: the JSON API and the downloads of the XML API.

Strongly consistent, as the real one is. It can hold requests back, answer a share of them with an error, and tell what
was asked. What it does not know it answers with 501, so that a test cannot pass for want of a feature.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import hashlib
import json
import random
import re
import threading
import time
import uuid
from collections.abc import Iterator
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "a-token-of-the-tests"
MOST = 1000
"""Keys of one page of a listing."""
QUANTUM = 2**18
"""Chunks of a resumable upload, but for the last one, are multiples of it."""


@dataclasses.dataclass(frozen=True)
class Object:
    """One generation of an object."""

    data: bytes
    generation: int
    updated: str
    content_type: str = "application/octet-stream"


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


class FakeGCS:
    """The server, inside the `with`.

    Args:
      buckets: those that there are.
      denied: every request is answered with 401, as one without credentials is.
    """

    def __init__(self, *buckets: str, denied: bool = False):
        self.objects: dict[str, dict[str, Object]] = {bucket: {} for bucket in buckets}
        self.denied = denied
        self.requests: list[str] = []
        """`METHOD path?query` of every request."""
        self.failed = 0
        """How many were answered with an error on purpose."""
        self.held: list[str] = []
        """Requests that were held back."""
        self._lock = threading.RLock()
        self._generations = 0
        self._uploads: dict[str, Upload] = {}
        self._fail: tuple[float, tuple[int, ...], random.Random] | None = None
        self._hold: re.Pattern[str] | None = None
        self._released = threading.Event()
        self._delay = 0.0
        self._server = Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> FakeGCS:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """What points the libraries here: gcsfs, tensorstore, and array_record's reader. None looks for a machine of
        Google's to log in from."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": TOKEN,
            "CLOUD_STORAGE_EMULATOR_ENDPOINT": self.url,
            "NO_GCE_CHECK": "true",
        }

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        """The keys that are there, in order."""
        with self._lock:
            return sorted(name for name in self.objects[bucket] if name.startswith(prefix))

    def put(self, bucket: str, name: str, data: bytes) -> None:
        """Puts an object there, without a request."""
        self._store(bucket, name, data, {}, "application/octet-stream")

    def hold(self, pattern: str) -> None:
        """From now on requests that match wait, until the end: they are never carried out."""
        self._hold = re.compile(pattern)

    def let_go(self) -> None:
        """Holds nothing back any more. What was held is answered with 503, and not carried out."""
        self._hold = None
        self._released.set()
        self._released = threading.Event()

    def slow_down(self, seconds: float) -> None:
        """Waits so long before every answer."""
        self._delay = seconds

    def fail(self, share: float, codes: tuple[int, ...] = (429, 503), seed: int = 0) -> None:
        """Answers a share of the requests with these errors; half of them after they were carried out."""
        self._fail = (share, codes, random.Random(seed)) if share else None

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        """One request."""
        with self._lock:
            self.requests.append(f"{method} {unquote(target)}")
            code, late = self._chance()
        time.sleep(self._delay)
        if self._hold is not None and self._hold.search(unquote(target) + body[:2000].decode("latin-1")):
            self.held.append(f"{method} {unquote(target)}")
            self._released.wait()
            return _error(503, "held back by the test")
        if code is not None and not late:
            return _error(code, "fails by intention of the test")
        try:
            if self.denied:
                raise Refused(401, "Anonymous caller does not have storage.objects.create access")
            with self._lock:
                given = self._route(method, target, headers, body)
        except Refused as refused:
            given = _error(refused.code, str(refused))
        return given if code is None else _error(code, "fails by intention of the test, too late")

    def _chance(self) -> tuple[int | None, bool]:
        if self._fail is None or self._fail[2].random() >= self._fail[0]:
            return None, False
        self.failed += 1
        return self._fail[2].choice(self._fail[1]), self._fail[2].random() < 0.5

    def _route(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        split = urlsplit(target)
        query = {key: values[-1] for key, values in parse_qs(split.query, keep_blank_values=True).items()}
        routes = (
            ("GET", r"/storage/v1/b/([^/]+)", self._bucket),
            ("GET", r"/storage/v1/b/([^/]+)/o", self._list),
            ("GET", r"(?:/download)?/storage/v1/b/([^/]+)/o/(.+)", self._get),
            ("DELETE", r"/storage/v1/b/([^/]+)/o/(.+)", self._delete),
            ("POST", r"/storage/v1/b/([^/]+)/o/([^/]+)/(?:rewriteTo|copyTo)/b/([^/]+)/o/([^/]+)", self._copy),
            ("POST", r"/storage/v1/b/([^/]+)/o/([^/]+)/moveTo/o/([^/]+)", self._move),
            ("POST", r"/upload/storage/v1/b/([^/]+)/o", self._upload),
            ("PUT", r"/upload/storage/v1/b/([^/]+)/o", self._continue),
            ("DELETE", r"/upload/storage/v1/b/([^/]+)/o", self._cancel),
            ("GET", r"/(?!storage/|download/|upload/)([^/]+)/(.+)", self._download),
        )
        for verb, pattern, call in routes:
            if verb == method and (match := re.fullmatch(pattern, split.path)):
                return call(*map(unquote, match.groups()), query=query, headers=headers, body=body)
        raise Refused(501, f"the fake has no {method} {split.path}")

    def _in(self, bucket: str) -> dict[str, Object]:
        if bucket not in self.objects:
            raise Refused(404, "The specified bucket does not exist.")
        return self.objects[bucket]

    def _object(self, bucket: str, name: str, query: dict[str, str]) -> Object:
        found = self._in(bucket).get(name)
        if found is None or query.get("generation", str(found.generation)) != str(found.generation):
            raise Refused(404, f"No such object: {bucket}/{name}")
        if query.get("ifGenerationMatch", str(found.generation)) != str(found.generation):
            raise Refused(412, "conditionNotMet")
        if query.get("ifGenerationNotMatch") == str(found.generation):
            raise Refused(304, "")
        return found

    def _store(self, bucket: str, name: str, data: bytes, query: dict[str, str], kind: str) -> Answer:
        with self._lock:
            before = self._in(bucket).get(name)
            wanted = query.get("ifGenerationMatch")
            if wanted is not None and wanted != str(before.generation if before else 0):
                raise Refused(412, "conditionNotMet")
            self._generations += 1
            now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            self.objects[bucket][name] = Object(data, 1_700_000_000_000_000 + self._generations, now, kind)
            return _json(self._describe(bucket, name))

    def _describe(self, bucket: str, name: str) -> dict[str, object]:
        held = self.objects[bucket][name]
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": name,
            "id": f"{bucket}/{name}/{held.generation}",
            "size": str(len(held.data)),
            "generation": str(held.generation),
            "metageneration": "1",
            "contentType": held.content_type,
            "md5Hash": base64.b64encode(hashlib.md5(held.data).digest()).decode(),
            "etag": str(held.generation),
            "timeCreated": held.updated,
            "updated": held.updated,
            "storageClass": "STANDARD",
        }

    def _bucket(self, bucket: str, **_: object) -> Answer:
        self._in(bucket)
        return _json({"kind": "storage#bucket", "name": bucket, "id": bucket, "location": "US"})

    def _list(self, bucket: str, *, query: dict[str, str], **_: object) -> Answer:
        self._in(bucket)
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        start, end = query.get("startOffset", ""), query.get("endOffset")
        entries: dict[str, bool] = {}  # in order; whether each is a prefix
        for name in self.names(bucket, prefix):
            if name < start or (end and name >= end):
                continue
            head, cut, _rest = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            entries[prefix + head + cut if cut else name] = bool(cut)
        after = base64.b64decode(query["pageToken"]).decode() if "pageToken" in query else ""
        most = min(int(query.get("maxResults", MOST)), MOST)
        left = [entry for entry in sorted(entries) if entry > after]
        page = left[:most]
        found: dict[str, object] = {
            "kind": "storage#objects",
            "items": [self._describe(bucket, entry) for entry in page if not entries[entry]],
            "prefixes": [entry for entry in page if entries[entry]],
        }
        if len(left) > most:
            found["nextPageToken"] = base64.b64encode(page[-1].encode()).decode()
        return _json(found)

    def _get(self, bucket: str, name: str, *, query: dict[str, str], headers: dict[str, str], **_: object) -> Answer:
        held = self._object(bucket, name, query)
        return _content(held, headers) if query.get("alt") == "media" else _json(self._describe(bucket, name))

    def _download(
        self, bucket: str, name: str, *, query: dict[str, str], headers: dict[str, str], **_: object
    ) -> Answer:
        """Of the XML API."""
        return _content(self._object(bucket, name, query), headers)

    def _delete(self, bucket: str, name: str, *, query: dict[str, str], **_: object) -> Answer:
        self._object(bucket, name, query)
        del self.objects[bucket][name]
        return Answer(204)

    def _copy(
        self, bucket: str, name: str, to_bucket: str, to_name: str, *, query: dict[str, str], **_: object
    ) -> Answer:
        held = self._object(bucket, name, {})
        self._store(to_bucket, to_name, held.data, query, held.content_type)
        return _json({"kind": "storage#rewriteResponse", "done": True, "resource": self._describe(to_bucket, to_name)})

    def _move(self, bucket: str, name: str, to_name: str, *, query: dict[str, str], **_: object) -> Answer:
        held = self._object(bucket, name, {})
        given = self._store(bucket, to_name, held.data, query, held.content_type)
        del self.objects[bucket][name]
        return given

    def _upload(
        self, bucket: str, *, query: dict[str, str], headers: dict[str, str], body: bytes, **_: object
    ) -> Answer:
        self._in(bucket)
        if "upload_id" in query:  # so gcsfs asks
            return self._continue(bucket, query=query, headers=headers, body=body)
        kind = headers.get("content-type", "application/octet-stream")
        if query["uploadType"] == "media":
            return self._store(bucket, query["name"], body, query, kind)
        if query["uploadType"] == "multipart":
            parts = message_from_bytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + body).get_payload()
            name = query.get("name") or json.loads(parts[0].get_payload())["name"]  # type: ignore[union-attr, index]
            return self._store(bucket, name, _second_part(body, kind), query, "application/octet-stream")
        if query["uploadType"] == "resumable":
            name = query.get("name") or json.loads(body)["name"]
            number = uuid.uuid4().hex
            self._uploads[number] = Upload(bucket, name, query)
            where = f"{self.url}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={number}"
            return Answer(200, headers={"Location": where})
        raise Refused(501, f"the fake has no uploadType={query['uploadType']}")

    def _continue(
        self, bucket: str, *, query: dict[str, str], headers: dict[str, str], body: bytes, **_: object
    ) -> Answer:
        del bucket
        upload = self._uploads.get(query["upload_id"])
        if upload is None:
            raise Refused(404, "no such upload")
        match = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", headers.get("content-range", "bytes */*"))
        if match is None:
            raise Refused(400, "Content-Range")
        if match[1] is not None:
            first = int(match[1])
            if first > len(upload.data):
                raise Refused(400, "a hole in the upload")
            if len(body) != int(match[2]) - first + 1:
                raise Refused(400, "not as long as it says")
            upload.data[first:] = body
        if upload.done is None and match[3] != "*" and len(upload.data) == int(match[3]):
            kind = "application/octet-stream"
            upload.done = self._store(upload.bucket, upload.name, bytes(upload.data), upload.query, kind)
        if upload.done is not None:
            return upload.done
        if len(upload.data) % QUANTUM:
            raise Refused(400, f"not a multiple of {QUANTUM} bytes")
        return Answer(308, headers={"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {})

    def _cancel(self, bucket: str, *, query: dict[str, str], **_: object) -> Answer:
        del bucket
        self._uploads.pop(query["upload_id"], None)
        return Answer(499)


class Server(ThreadingHTTPServer):
    """Says nothing of clients that are killed, or close a connection because they have read enough."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@dataclasses.dataclass
class Upload:
    """A resumable upload that has begun."""

    bucket: str
    name: str
    query: dict[str, str]
    data: bytearray = dataclasses.field(default_factory=bytearray)
    done: Answer | None = None


@dataclasses.dataclass(frozen=True)
class Answer:
    """What is sent back."""

    code: int
    body: bytes = b""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)


def _second_part(body: bytes, kind: str) -> bytes:
    """Of a multipart body, byte for byte: the parser of mails takes a last line break for its own."""
    match = re.search(r"boundary=\"?([^\";]+)\"?", kind)
    assert match is not None, kind
    mark = b"--" + match[1].encode()
    part = body.split(mark)[2]
    separator = b"\r\n\r\n" if b"\r\n\r\n" in part else b"\n\n"
    content = part.partition(separator)[2]
    return content.removesuffix(b"\n").removesuffix(b"\r") if content.endswith(b"\n") else content


def _json(value: object, code: int = 200) -> Answer:
    return Answer(code, json.dumps(value).encode(), {"Content-Type": "application/json; charset=UTF-8"})


def _error(code: int, message: str) -> Answer:
    return Answer(code) if code == 304 else _json({"error": {"code": code, "message": message}}, code)


def _content(held: Object, headers: dict[str, str]) -> Answer:
    """All of an object, or a range of it."""
    size, data = len(held.data), held.data
    hashed = base64.b64encode(hashlib.md5(data).digest()).decode()
    told = {
        "Content-Type": held.content_type,
        "X-Goog-Generation": str(held.generation),
        "X-Goog-Stored-Content-Length": str(size),
        "X-Goog-Hash": f"md5={hashed}",
        "ETag": f'"{held.generation}"',
    }
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("range", ""))
    if match is None:
        return Answer(200, data, told)
    if match[1]:
        first, last = int(match[1]), min(int(match[2] or size - 1), size - 1)
    else:
        first, last = max(size - int(match[2]), 0), size - 1
    if first >= size:
        return Answer(416, b"", told | {"Content-Range": f"bytes */{size}"})
    return Answer(206, data[first : last + 1], told | {"Content-Range": f"bytes {first}-{last}/{size}"})


def _handler(fake: FakeGCS) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            given = fake.answer(self.command, self.path, headers, self._body(headers))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who asked was killed
                self.send_response(given.code)
                for name, value in given.headers.items():
                    self.send_header(name, value)
                if given.code not in (204, 304):
                    self.send_header("Content-Length", str(len(given.body)))
                self.end_headers()
                self.wfile.write(given.body)

        def _body(self, headers: dict[str, str]) -> bytes:
            if headers.get("transfer-encoding", "").lower() == "chunked":
                return b"".join(self._chunks())
            return self.rfile.read(int(headers.get("content-length", 0)))

        def _chunks(self) -> Iterator[bytes]:
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()

        do_GET = do_POST = do_PUT = do_DELETE = _serve

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
