"""Settings of the documentation, built by ``make docs``; a warning is an error there."""

from __future__ import annotations

import re

import farfield

project = "farfield"
author = "farfield developers"
copyright = "farfield developers"
release = version = farfield.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
# printed-numbers.md is a part of results.md.
exclude_patterns = ["_build", "printed-numbers.md"]
html_theme = "furo"
html_title = f"farfield {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Cost", "Reference"]

# Marks that the docstrings use for themselves, (b, c, *size) and |x|, and that reStructuredText would read as markup.
_MARKS = re.compile(r"(``.*?``|^ *\* |\*\*[A-Z].*?\*\*)|(?<!\\)([*|])|(?<=\w)(_)(?=\W|$)")


def _escape(application, what, name, obj, options, lines):
    inside_example = False
    for index, line in enumerate(lines):
        inside_example = line.lstrip().startswith((">>>", "...")) or (inside_example and bool(line.strip()))
        if not inside_example:
            lines[index] = _MARKS.sub(lambda found: found[1] or "\\" + (found[2] or found[3]), line)


def setup(application):
    """Escape before napoleon (priority 500) makes fields of the sections."""
    application.connect("autodoc-process-docstring", _escape, priority=400)
