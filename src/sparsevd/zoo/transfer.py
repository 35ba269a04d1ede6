"""One HTTP transfer within limits that hold for the whole of it: redirects, headers and content together.

The time-out of urllib is one for each read. A server that sends a byte a second, in its headers or after them, never
reaches it. Here every read of the socket looks at what has come since the beginning.
"""

import io
import time
import urllib.request
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from socket import socket
from typing import Any
from urllib.error import HTTPError

from sparsevd.errors import DataError

_HEADERS = 10_000_000  # bytes that are not content: headers, and the frames of chunks


@dataclass(frozen=True)
class Limits:
    """Seconds until an answer comes and for the whole transfer, bytes at most, and bytes per second at least."""

    to_answer: float
    in_all: float
    largest: int
    slowest: float


class Transfer:
    """A URL that is fetched: what has come so far, and whether that is enough."""

    def __init__(self, url: str, limits: Limits):
        self.url, self.limits = url, limits
        self._begun = time.monotonic()
        self._received = 0  # bytes, those of headers and redirects included

    def content(self) -> bytes:
        """The content, or a DataError."""
        parts: list[bytes] = []
        received = 0
        try:
            with self._opener().open(self.url, timeout=self.limits.to_answer) as response:
                promised = self._promised(response.headers.get("Content-Length"))
                while part := response.read(1 << 16):
                    parts.append(part)
                    received += len(part)
                    if received > self.limits.largest:
                        raise self._too_large()
        except HTTPError as error:
            error.close()  # it is the answer, too
            raise DataError(f"{self.url}: {error}") from error
        # URLError and time-outs are OSErrors; a redirect may name a port that does not exist.
        except (OSError, ValueError, HTTPException, OverflowError) as error:
            raise DataError(f"{self.url}: {error}") from error
        if promised is not None and promised != received:
            raise DataError(f"{self.url} broke off after {received:,} of {promised:,} bytes")
        if not received:
            raise DataError(f"{self.url} gives nothing")
        return b"".join(parts)

    def seconds_left(self) -> float:
        """How long the next read may wait; a DataError if it is too late."""
        elapsed = time.monotonic() - self._begun
        if elapsed > self.limits.in_all:
            raise DataError(f"{self.url} took more than {self.limits.in_all:g} seconds")
        if elapsed > 2 * self.limits.to_answer and self._received < self.limits.slowest * elapsed:
            raise DataError(f"{self.url} is too slow ({self._received / elapsed / 1000:.1f} kB/s)")
        return min(self.limits.to_answer, self.limits.in_all - elapsed)

    def count(self, received: int) -> None:
        """So many bytes have come."""
        self._received += received
        if self._received > self.limits.largest + _HEADERS:
            raise self._too_large()

    def _too_large(self) -> DataError:
        return DataError(f"{self.url} gives more than {self.limits.largest:,} bytes")

    def _promised(self, header: str | None) -> int | None:
        if header is None:
            return None
        if not (header.isascii() and header.isdecimal() and len(header) < 20):
            raise DataError(f"{self.url} has Content-Length {header[:40]!r}, which is no number of bytes")
        if int(header) > self.limits.largest:
            raise DataError(f"{self.url} gives {int(header):,} bytes, more than {self.limits.largest:,}")
        return int(header)

    def _opener(self) -> urllib.request.OpenerDirector:
        """Of http and https alone: a redirect to ftp or to a file is not followed."""
        transfer = self

        class Response(HTTPResponse):
            def __init__(self, sock: socket, *args: Any, **kwargs: Any):
                super().__init__(sock, *args, **kwargs)
                self.fp = io.BufferedReader(_Watched(self.fp.detach(), sock, transfer))

        class Connection(HTTPConnection):
            response_class = Response

        class SecureConnection(HTTPSConnection):
            response_class = Response

        class Handler(urllib.request.HTTPHandler):
            def http_open(self, request: urllib.request.Request) -> HTTPResponse:
                return self.do_open(Connection, request)

        class SecureHandler(urllib.request.HTTPSHandler):
            def https_open(self, request: urllib.request.Request) -> HTTPResponse:
                return self.do_open(SecureConnection, request)

        opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(),
            Handler(),
            SecureHandler(),
            urllib.request.UnknownHandler(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPRedirectHandler(),
            urllib.request.HTTPErrorProcessor(),
        ):
            opener.add_handler(handler)
        return opener


class _Watched(io.RawIOBase):
    """A socket's bytes, each read of which is reported to the transfer."""

    def __init__(self, raw: io.RawIOBase, sock: socket, transfer: Transfer):
        self._raw, self._sock, self._transfer = raw, sock, transfer

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._transfer.seconds_left())
        count = self._raw.readinto(buffer)
        self._transfer.count(count or 0)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
