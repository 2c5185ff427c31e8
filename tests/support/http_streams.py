"""Random streams of HTTP requests, most parts of which are as they should be."""

from __future__ import annotations

import random

_LINE_ENDS = (b"\r\n",) * 12 + (b"\n", b"\r", b"\r\n\r\n", b" \r\n")
_EXTENSIONS = (b"",) * 8 + (b";a", b";a=b", b'; a="b;c"', b" ", b"\t;a", b";" + b"x" * 40, b";a=\x00")
_TRAILERS = (b"",) * 6 + (b"T: u\r\n", b"Content-Length: 3\r\n", b"T:\r\n u\r\n", b": u\r\n")
_LENGTHS = (b"%d",) * 8 + (b"0%d", b" %d ", b"+%d", b"%d,%d", b"00000000000000000000000%d")
_NOISE = b"\r\n\t ;:,0123456789abcdefABCDEFGHIJPOSTx\x00\x80"


def _request(random: random.Random) -> bytes:
    head = b"POST /%d HTTP/1.1\r\nHost: h\r\n" % random.randrange(100)
    if random.random() < 0.2:
        return head.replace(b"POST", b"GET") + random.choice(_LINE_ENDS)
    if random.random() < 0.4:
        body = random.randbytes(random.randrange(20))
        length = random.choice(_LENGTHS).replace(b"%d", b"%d" % len(body))
        return head + b"Content-Length: " + length + b"\r\n" + random.choice(_LINE_ENDS) + body
    parts = [head, b"Transfer-Encoding: chunked\r\n\r\n"]
    for _ in range(random.randrange(4)):
        chunk = random.randbytes(random.randrange(1, 20))
        zeros = random.choice((0, 0, 0, 1, 5, 14, 15, 19, 20, 21, 40))
        size = (b"%x" if random.random() < 0.5 else b"%X") % (len(chunk) + (random.random() < 0.05))
        parts += [b"0" * zeros, size, random.choice(_EXTENSIONS), random.choice(_LINE_ENDS), chunk]
        parts.append(random.choice(_LINE_ENDS))
    last = b"0" * random.choice((1, 1, 1, 2, 16, 17, 21))
    return b"".join([*parts, last, random.choice(_EXTENSIONS), b"\r\n", random.choice(_TRAILERS), b"\r\n"])


def random_stream(random: random.Random) -> bytes:
    """One to three requests, with some bytes of noise in half of the streams."""
    data = bytearray(b"".join(_request(random) for _ in range(random.randrange(1, 4))))
    for _ in range(random.choice((0, 0, 0, 1, 2))):
        at = random.randrange(len(data) + 1)
        noise = bytes(random.choices(_NOISE, k=random.randrange(3)))
        data[at : at + random.randrange(3)] = noise
    return bytes(data)
