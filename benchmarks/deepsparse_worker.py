"""Runs in DeepSparse's own environment: times an ONNX file whenever a line "<calls>" comes in.

Usage: python deepsparse_worker.py MODEL.onnx INPUT.npy THREADS OUTPUT.npy
"""

import sys
import time

import numpy
from deepsparse import compile_model

model, inputs, threads, output = sys.argv[1:]
x = [numpy.load(inputs)]
engine = compile_model(model, batch_size=len(x[0]), num_cores=int(threads))
numpy.save(output, engine.run(x)[0])
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    for _ in range(int(line)):
        engine.run(x)
    print((time.perf_counter() - start) / int(line), flush=True)
