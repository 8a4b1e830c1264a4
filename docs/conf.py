"""Settings of the documentation, built by ``make docs``; a warning is an error there."""

from __future__ import annotations

import os
import re
from pathlib import Path

from docutils import nodes
from filelock import FileLock
from latex2mathml.converter import convert
from sphinx.util.nodes import make_refnode

import farfield
from farfield.ops import OPERATORS
from farfield_papers.cli.explore.page import write
from farfield_papers.cli.explore.panels import panels_of_features

project = "farfield"
author = "farfield developers"
copyright = "farfield developers"
release = version = farfield.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
# Notebooks are stored with their outputs; tests/test_site.py runs them.
nb_execution_mode = "off"
# Every build runs the programs of the gallery, and fails if one of them does.
sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "filename_pattern": r"/plot_",
    "run_stale_examples": True,
    "within_subsection_order": "FileNameSortKey",
    "image_srcset": ["2x"],
    "thumbnail_size": (480, 336),
    "css": ("sg_gallery",),
    "notebook_extensions": set(),
    "capture_repr": (),
    "download_all_examples": False,
    "write_computation_times": False,
    "min_reported_time": 3600,
    "inspect_global_variables": False,
    "show_signature": False,
}
# The names of other libraries lead to their pages only in a build that may read the network; the pages need none.
if os.environ.get("DOCS_INTERSPHINX") == "1":
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "numpy": ("https://numpy.org/doc/stable", None),
    }
# gallery is the source of auto_gallery, whose pages are the ones to read.
exclude_patterns = ["_build", "gallery"]
html_theme = "furo"
html_title = f"farfield {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "static/logo.svg"
html_logo = "static/logo.svg"
html_theme_options = {"top_of_page_buttons": []}
# Equations are MathML, which browsers typeset by themselves.
html_math_renderer = "mathml"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
# Its package needs an environment of its own.
autodoc_mock_imports = ["bioimageio"]
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


def _write_inline_math(writer, node):
    writer.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _write_block_math(writer, node):
    writer.body.append(f'<div class="equation">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def _link_names(application, doctree, page):
    """Make a link of each literal that names something in the API: `farfield.x.y`, `x.y` or a class's name."""
    domain = application.env.get_domain("py")
    objects = {name: entry for name, entry in domain.objects.items() if entry.objtype != "module"}
    classes = {}
    for name, entry in objects.items():
        if entry.objtype in ("class", "exception"):
            classes.setdefault(name.rpartition(".")[2], name)
    for literal in list(doctree.findall(nodes.literal)):
        if isinstance(literal.parent, nodes.reference | nodes.title):
            continue
        text = literal.astext().removesuffix("()")
        names = (text, f"farfield.{text}", f"farfield_papers.{text}", classes.get(text, ""))
        name = next((each for each in names if each in objects), None)
        if name is not None:
            entry = objects[name]
            link = make_refnode(application.builder, page, entry.docname, entry.node_id, literal.deepcopy(), name)
            literal.replace_self(link)


def _write_explorer(application, exception):
    """Write the page that index.md and guide/insert.md show."""
    if exception is None and application.builder.format == "html":
        content = panels_of_features(None, list(OPERATORS), 40)
        write(content, Path(application.outdir) / "explore.html")


# All builds of a checkout write auto_gallery: one at a time.
_building = FileLock(Path(__file__).parent / "_build" / "gallery.lock")


def setup(application):
    """Escape before napoleon, lock before the gallery: both have priority 500."""
    application.connect("builder-inited", lambda application: _building.acquire(), priority=400)
    application.connect("build-finished", lambda application, exception: _building.release(), priority=600)
    application.connect("autodoc-process-docstring", _escape, priority=400)
    application.connect("doctree-resolved", _link_names)
    application.connect("build-finished", _write_explorer)
    application.add_html_math_renderer("mathml", (_write_inline_math, None), (_write_block_math, None))
