"""One small picture of a network: a closed list of operations, constants by name, any batch size.

    graph = sparsevd.capture(pruned, example)      # from a torch module, with an example input
    print(graph)                                   # a table, one operation a line
    y = graph(x)                                   # the graph computes itself: the oracle of all that is built on it
    module = to_module(graph)                      # plain torch again
    description = graph.as_dict()                  # all but the constants, as JSON can hold it
    graph = Graph.from_dict(description, constants)  # checked, from anywhere

To build on it, go through `graph.nodes` in their order; each `Node` has a name, an op out of `OPS`, the names of its
inputs (nodes before it, or keys of `graph.constants`), plain attributes and the shape of its result. In shapes, and
only there, -k stands for k times the batch size. Handle the operations you know and refuse the others by name; there
are no others than those of `OPS`. Graphs are not changed: a rewriting makes a new one and calls `check()` on it.
"""

from sparsevd.graph.capture import capture
from sparsevd.graph.module import to_module
from sparsevd.graph.operations import DTYPES, OPS, Attribute, Operation
from sparsevd.graph.structure import Graph, Node, describe_shape, evaluate, sizes

__all__ = [
    "DTYPES",
    "OPS",
    "Attribute",
    "Graph",
    "Node",
    "Operation",
    "capture",
    "describe_shape",
    "evaluate",
    "sizes",
    "to_module",
]
