"""Requests that are no HTTP, and some that are it in a rare way, as bytes."""

from __future__ import annotations

from serving import MODEL

BODY = b'{"model":"%s","messages":[{"role":"user","content":"a"}]}' % MODEL.encode()
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
VERSION = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


def chat(*headers: bytes, body: bytes = BODY) -> bytes:
    """A request with these headers."""
    return CHAT + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + body


LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"
SMUGGLED = b"0\r\n\r\n" + VERSION
REFUSED = {
    "a length and chunks": chat(LENGTH, CHUNKED, body=SMUGGLED),
    "chunks and a length": chat(CHUNKED, b"Content-Length: 5", body=SMUGGLED),
    "two lengths": chat(b"Content-Length: 5", LENGTH),
    "a length that is none": chat(b"Content-Length: 0x10"),
    "a length with a sign": chat(b"Content-Length: +5"),
    "a length below nothing": chat(b"Content-Length: -5"),
    "a length beyond all": chat(b"Content-Length: 99999999999999999999999"),
    "a list of lengths": chat(b"Content-Length: 5, 5"),
    "chunks that are not last": chat(b"Transfer-Encoding: chunked, identity", body=SMUGGLED),
    "a coding nobody knows": chat(b"Transfer-Encoding: xchunked", body=SMUGGLED),
    "a space before the colon": chat(b"Content-Length : 5"),
    "a zero in a header": chat(LENGTH, b"X-A: a\0b"),
    "a bare carriage return": chat(LENGTH, b"X-A: a\rX-B: b"),
    "a header without a name": chat(LENGTH, b": b"),
    "a header without a colon": chat(LENGTH, b"nothing"),
    "a name that is none": chat(LENGTH, b"X(A): b"),
    "a chunk beyond all": chat(CHUNKED, body=b"FFFFFFFFFFFFFFFFF\r\n"),
    "a chunk below nothing": chat(CHUNKED, body=b"-1\r\n"),
    "a chunk that is longer than it says": chat(CHUNKED, body=b"2\r\n{}}}}\r\n0\r\n\r\n"),
    "a chunk in no digits": chat(CHUNKED, body=b"zz\r\n"),
    "no version": b"GET /version\r\n\r\n",
    "a version to come": b"GET /version HTTP/7.3\r\nHost: localhost\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no method": b"/version HTTP/1.1\r\n\r\n",
    "a method nobody knows": b"SING /version HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a target that is none": b"GET version HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a target with a space": b"GET /ver sion HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a target that is no text": b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a proxy's method": b"CONNECT h:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(80),
    "nothing but zeros": bytes(100),
}

UNUSUAL = {
    "a whole address": (b"GET http://localhost:9/version HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\n\r\n", 200),
    "no host": (b"GET /version HTTP/1.1\r\nConnection: close\r\n\r\n", 200),
    "HTTP/1.0": (b"GET /version HTTP/1.0\r\n\r\n", 200),
    "a part of a target": (b"GET /version?a=%ff#b HTTP/1.1\r\nConnection: close\r\n\r\n", 200),
    "a path that climbs": (b"GET /../../etc/passwd HTTP/1.1\r\nConnection: close\r\n\r\n", 404),
    "a path of zeros": (b"GET /%00%00 HTTP/1.1\r\nConnection: close\r\n\r\n", 404),
    "half a letter": (b"GET /%C3 HTTP/1.1\r\nConnection: close\r\n\r\n", 404),
    "a star": (b"OPTIONS * HTTP/1.1\r\nConnection: close\r\n\r\n", 404),
    "a notice at a chunk": (
        chat(CHUNKED, b"Connection: close", body=b"%x;note=1\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)),
        200,
    ),
    "trailers": (chat(CHUNKED, b"Connection: close", body=b"%x\r\n%s\r\n0\r\nX: y\r\n\r\n" % (len(BODY), BODY)), 200),
    "a pause to be asked": (chat(LENGTH, b"Expect: 100-continue", b"Connection: close"), 200),
    "no body": (chat(b"Connection: close", body=b""), 400),
}
