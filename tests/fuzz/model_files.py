"""Throws damaged and hostile files at the decoder, with their checksums put right so that they get past it.

    python tests/fuzz_pack.py --inputs 1000000                # random changes
    python tests/fuzz_pack.py --inputs 1000000 --guided       # atheris: changes that reach new lines are built upon

Three kinds of files: changed bytes of a good one; a changed header, coded as a good one would be, before random bytes;
a changed graph in an otherwise good file. Anything but a network or a FormatError ends the run, and so does an input
that takes longer than 10 seconds or more memory than its allowance.
"""

import argparse
import json
import random
import resource
import sys
import time
import warnings
import zlib
from contextlib import closing
from dataclasses import replace
from types import FunctionType

import torch
from torch import nn

import sparsevd
from sparsevd import pack
from sparsevd.errors import FormatError
from sparsevd.graph import to_module
from sparsevd.pack import container
from sparsevd.pack.container import FRAME, MAGIC, VERSION
from sparsevd.pack.description import graph_of
from sparsevd.pack.native import coder

SLOWEST = 10.0


def sealed(content: bytes) -> bytes:
    head = MAGIC + bytes([VERSION])
    return head + zlib.crc32(head + content).to_bytes(4, "little") + content


def good_files() -> list[tuple[bytes, container.Packed]]:
    """Small files that together hold every form, with graphs and without."""
    torch.manual_seed(0)
    conv = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 4)
    )
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.mul_(torch.rand_like(parameter) < 0.3)
    image = torch.zeros(2, 1, 8, 8)
    dense = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 5))
    sparse = sparsevd.sparsify(dense, initial_log_sigma2=-4.0)
    tied = nn.ModuleDict({"a": nn.Linear(5, 5).half(), "b": nn.Linear(3, 2).double()})
    tied["c"] = tied["a"]
    return [
        pack.pack(conv, example=image),
        pack.pack(conv, example=image, precision=3),
        pack.pack(sparse, example=torch.zeros(2, 30), precision="posterior"),
        pack.pack(tied),
        pack.pack(nn.Linear(40, 30), precision=2),
    ]


class Fuzzer:
    def __init__(self, seed: int) -> None:
        self.files = good_files()
        self.random = random.Random(seed)
        self.counts = {"refused": 0, "read": 0, "rebuilt": 0}
        self.slowest = 0.0
        self.good_graphs = {packed.graph for _, packed in self.files}  # to rebuild them takes milliseconds: not always

    def changed(self, data: bytes, draw: random.Random) -> bytes:
        out = bytearray(data)
        for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
            kind, place = draw.randrange(5), draw.randrange(len(out) + 1)
            if kind == 0 and out:
                out[place % len(out)] ^= 1 << draw.randrange(8)
            elif kind == 1 and out:
                out[place % len(out)] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
            elif kind == 2:
                out[place:place] = draw.randbytes(draw.choice((1, 2, 9)))
            elif kind == 3:
                del out[place : place + draw.choice((1, 2, 20))]
            else:
                other = draw.randrange(len(out) + 1)
                out[place:place] = out[other : other + 12]
        return bytes(out)

    def make(self, draw: random.Random) -> bytes:
        data, packed = draw.choice(self.files)
        kind = draw.random()
        if kind < 0.45:
            return sealed(self.changed(data[FRAME:], draw))
        if kind < 0.5 and packed.graph:
            other = replace(packed, graph=self.changed(packed.graph, draw), extra=draw.choice((0, 0, 0, 1, 200)))
            return container.encode(other, choose_widths=False)
        header = container.header_of(packed)
        return self.with_header(self.changed(header, draw), draw.randbytes(draw.choice((0, 5, 100))))

    def with_header(self, header: bytes, tail: bytes) -> bytes:
        with closing(coder()) as stream:
            stream.prime(container.PRIME)
            for byte in container.varint(len(header)):
                stream.code_bytes(bytearray([byte]))
            stream.code_bytes(bytearray(header))
            return sealed(stream.finish() + tail)

    def try_one(self, data: bytes) -> None:
        started = time.process_time()  # the process may be stopped for a while
        try:
            packed = container.decode(data)
            tensors = pack.tensors_of(packed.entries)
            self.counts["read"] += 1
            allowance = container.FREE_BYTES + container.MOST_PER_BYTE * len(data)
            assert sum(tensor.numel() * 4 for tensor in tensors.values()) <= 2 * allowance
            if packed.graph and (packed.graph not in self.good_graphs or self.counts["read"] % 50 == 0):
                to_module(graph_of(packed.graph, tensors))
                self.counts["rebuilt"] += 1
        except FormatError:
            self.counts["refused"] += 1
        except BaseException:
            print("the input:", data.hex(), file=sys.stderr)
            raise
        seconds = time.process_time() - started
        if seconds > SLOWEST:
            raise TimeoutError(f"{seconds:.1f} s for {data.hex()}")
        self.slowest = max(self.slowest, seconds)

    def report(self, inputs: int, seconds: float) -> str:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        figures = {
            "inputs": inputs,
            **self.counts,
            "seconds": round(seconds),
            "slowest": round(self.slowest, 3),
            "peak_mb": peak,
        }
        return json.dumps(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--guided", action="store_true", help="with atheris, if it is installed")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    started = time.perf_counter()
    if options.guided:
        guided(options.inputs, options.seed, started)
        return
    fuzzer = Fuzzer(options.seed)
    for i in range(1, options.inputs + 1):
        fuzzer.try_one(fuzzer.make(fuzzer.random))
        if i % 50_000 == 0:
            print(fuzzer.report(i, time.perf_counter() - started), flush=True)
    print(fuzzer.report(options.inputs, time.perf_counter() - started))


def guided(inputs: int, seed: int, started: float) -> None:
    """The first byte says which kind of file; the rest is the header, the graph or the content itself."""
    import atheris

    for module in ("container", "description", "fields"):
        for item in vars(sys.modules[f"sparsevd.pack.{module}"]).values():
            if isinstance(item, FunctionType) and item.__module__ == f"sparsevd.pack.{module}":
                atheris.instrument_func(item)
    fuzzer = Fuzzer(seed)
    done = 0

    def one(data: bytes) -> None:
        nonlocal done
        done += 1
        kind, rest = (data[0], data[1:]) if data else (0, b"")
        if kind % 3 == 0:
            fuzzer.try_one(sealed(rest))
        elif kind % 3 == 1:
            fuzzer.try_one(fuzzer.with_header(rest, b"tail"))
        else:
            packed = fuzzer.files[kind % 2][1]
            fuzzer.try_one(container.encode(replace(packed, graph=rest), choose_widths=False))
        if done % 50_000 == 0 or done == inputs:
            print(fuzzer.report(done, time.perf_counter() - started), flush=True)

    atheris.Setup([sys.argv[0], f"-runs={inputs}", f"-seed={seed + 1}", "-max_len=2000", "-rss_limit_mb=8000"], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
