"""The configuration of the documentation site; `make docs` builds it into docs/_build/html.

The built pages need no network: formulas are MathML, fonts and scripts are the theme's own files,
and no inventory of another project is fetched.
"""

import os
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS / "extensions"))


from aevb.version import __version__  # noqa: E402

project = "aevb"
author = "the aevb developers"
copyright = author
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "mathml",
    "from_source",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]

# Pages are MyST Markdown; the same text must read well without Sphinx.
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
smartquotes = False  # it would make a dash of the -- of an option

# Notebooks of the tutorial run once; a page that did not change comes from the cache.
nb_execution_mode = "cache"
nb_execution_cache_path = str(DOCS / "_build" / "notebooks")
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_ipywidgets_js = {}  # the default loads scripts from other hosts
# Each kernel would warn that it speaks TCP, which stays on this machine.
profile = DOCS / "_build" / "ipython" / "profile_default"
profile.mkdir(parents=True, exist_ok=True)
(profile / "ipython_kernel_config.py").write_text("c.IPKernelApp.log_level = 40\n")
os.environ["IPYTHONDIR"] = str(profile.parent)

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

nitpicky = True
# Names outside the reference: other libraries, whose inventories are not fetched, and types that
# appear in signatures but are no part of the public interface.
nitpick_ignore_regex = [
    ("py:.*", r"(?!aevb\.).*"),
    ("py:.*", r"aevb\.[a-z_]+\..*"),
]

html_theme = "pydata_sphinx_theme"
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
html_sidebars = {page: [] for page in ("index", "start", "changes")}  # pages without neighbours
html_title = "aevb"
html_static_path = ["_static"]
html_css_files = ["aevb.css"]
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"
html_theme_options = {
    "logo": {"text": "aevb"},
    "navbar_end": ["theme-switcher"],
    "footer_start": [],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "pygments_light_style": "tango",
    "pygments_dark_style": "github-dark",
}
