"""`sparsevd.prune` in a page's prose becomes a link to its description. On a forge it stays what it is."""

import re

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

NAME = re.compile(r"(sparsevd(?:\.\w+)+)(?:\(.*\))?")


def link(app: Sphinx, document: nodes.document) -> None:
    for literal in list(document.findall(nodes.literal)):
        match = NAME.fullmatch(literal.astext())
        inside = literal.parent
        if match is None or isinstance(inside, nodes.reference | nodes.title | pending_xref):
            continue
        reference = pending_xref(
            "",
            refdomain="py",
            reftype="obj",
            reftarget=match[1],
            refexplicit=True,
            refwarn=False,
            refdoc=app.env.docname,
        )
        literal.replace_self(reference)
        reference += literal


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-read", link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
