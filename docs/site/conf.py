"""Sphinx's configuration of the site. `make docs` gathers the sources and builds it."""

import importlib
import inspect
import os
import sys
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PUBLISHED = os.environ.get("SIMFBO_DOCS_VERSION", "")  # the workflow sets it: "latest" or a tag
sys.path.insert(0, str(HERE))

import api_pages  # noqa: E402
from links import REPOSITORY, ROOT  # noqa: E402

import simfbo  # noqa: E402

for _title, _place in api_pages.NAMESPACES.items():
    sys.modules[_title] = importlib.import_module(_place)  # simfbo.sampling is simfbo.core.sampling

# sphinx-gallery's workers end when they have grown; the examples they hold start again elsewhere.
warnings.filterwarnings("ignore", "A worker stopped while some jobs")

project = "simfbo"
author = "The simfbo maintainers"
project_copyright = author
version = release = simfbo.__version__ + (".dev" if PUBLISHED == "latest" else "")
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.linkcode",
    "sphinx_gallery.gen_gallery",
    "sphinxcontrib.katex",
    "docstrings",
    "llms",
]
templates_path = [str(HERE / "_templates")]  # autosummary would look in the sources
exclude_patterns = ["gallery/*.ipynb", "gallery/*.py", "gallery/*.json", "gallery/*.zip"]
default_role = "py:obj"

# Markdown and notebooks
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
html_math_renderer = "katex"
katex_css_path = "katex/katex.min.css"

# The API
autosummary_generate = True
autosummary_context = {"same_as": {one.full: one.same_as for one in api_pages.public_names()}}
autosummary_filename_map = api_pages.FILES
autodoc_mock_imports = ["torch"]
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_attr_annotations = False  # the signature has them
napoleon_custom_sections = [("Attributes", "params_style")]

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": "",
    "image_scrapers": ("gallery.figures",),
    "reset_modules": ("matplotlib", "gallery.short_warnings"),
    "min_reported_time": 0,
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,  # each page says its own; the table would load scripts
    "parallel": 2,
}

# The pages
html_theme = "pydata_sphinx_theme"
html_title = "simfbo"
html_sidebars = {"index": [], "changelog": []}
html_baseurl = f"https://simfbo.github.io/simfbo/{PUBLISHED or 'latest'}/"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = str(HERE / "_static" / "favicon.svg")
html_context = {"default_mode": "auto"}
html_sourcelink_suffix = ""  # the source of a tutorial is a notebook to download
html_theme_options: dict[str, Any] = {
    "github_url": REPOSITORY,
    "navbar_persistent": ["search-button"],
    "navbar_align": "left",
    "header_links_before_dropdown": 9,
    "secondary_sidebar_items": ["page-toc", "notebook-link", "sg_download_links", "sourcelink"],
    "footer_end": [],
    "navbar_end": ["theme-switcher", "navbar-icon-links"],
}
if PUBLISHED:  # among other versions; a site on disk has none to switch to
    html_theme_options["navbar_end"] = ["version-switcher", "theme-switcher", "navbar-icon-links"]
    html_theme_options["switcher"] = {"json_url": "../versions.json", "version_match": PUBLISHED}
    html_theme_options["check_switcher"] = False
    html_theme_options["show_version_warning_banner"] = True


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """Return where GitHub shows the source of a name."""
    found: Any = sys.modules.get(info["module"])
    for part in info["fullname"].split("."):
        found = getattr(found, part, None)
    found = inspect.unwrap(getattr(found, "fget", found))
    try:
        file, (_, line) = inspect.getsourcefile(found), inspect.getsourcelines(found)
    except (TypeError, OSError):
        return None
    if not file or ROOT not in Path(file).parents:
        return None
    return f"{REPOSITORY}/blob/main/{Path(file).relative_to(ROOT).as_posix()}#L{line}"
