"""What sphinx-gallery needs to know about our examples."""

import shutil
import warnings
from pathlib import Path
from typing import Any

from sphinx_gallery.scrapers import figure_rst


def short_warnings(gallery_conf: dict[str, Any], file: str) -> None:
    """Let warnings of an example say what they have to, not where on this machine they arose."""
    warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}\n"


class Figures:
    """Take the picture that an example wrote into its folder of output."""

    def __repr__(self) -> str:
        return "Figures"  # part of the configuration that Sphinx compares between builds

    def __call__(self, block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
        """Return the reST of a figure, if this block wrote one."""
        options = block_vars["example_globals"].get("options")
        written = Path(options.output, "figure.png") if options else None
        if written is None or not written.is_file():
            return ""
        target = Path(next(block_vars["image_path_iterator"]))
        shutil.move(written, target)
        title = block_vars["example_globals"]["__doc__"].strip().partition("\n")[0]
        return figure_rst([str(target)], gallery_conf["src_dir"], title)


figures = Figures()
