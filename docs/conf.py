"""How the site is built: `make docs`. Pages are the repository's own Markdown files, at their own paths.

The source folder is the repository, so a relative link means the same here and on a forge; what it leads to outside
the pages (records, scripts) is copied into the site. Nothing is loaded from elsewhere: maths becomes MathML.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_site"))

from sphinx.ext.autodoc.mock import mock

import sparsevd

# Other people's trainers are only the parents of our callbacks, and take longer to import than the site to build.
with mock(["lightning", "transformers", "accelerate"]):
    import sparsevd.integrations.lightning
    import sparsevd.integrations.transformers

project = "sparsevd"
version = release = sparsevd.__version__
root_doc = "docs/index"
root_pages = ["CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
include_patterns = [*root_pages, "docs/**/*.md", "docs/*.md", "experiments/README.md"]
exclude_patterns = [".*", "build", "runs", "src", "tests"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "mathml",
    "docstrings",
    "code_links",
    "navigation",
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # as on a forge
suppress_warnings = ["myst.xref_ambiguous"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
pygments_dark_style = "monokai"
html_title = "sparsevd"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_extra_path = ["_site/root"]
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
