"""A hook of mkdocs: links from docs/ to other files of the repository become plain code in the site.

On GitHub such a link opens the file. The site has pages only, so the hook keeps the text and names the file.
A link to a file that does not exist is an error. Images from outside docs/ are copied beside the pages.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page's Markdown without links that leave the site; FileNotFoundError for a broken one."""
    root = Path(config["config_file_path"]).parent

    def resolve(match: re.Match[str]) -> str:
        image, text, target, _ = match.groups()
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), target))
        if files.get_file_from_path(posixpath.relpath(path, "docs")):
            return match.group()
        if not (root / path).exists():
            raise FileNotFoundError(f"docs/{page.file.src_uri} links to {target}, which does not exist")
        if image:
            name = Path(path).name
            Path(config["site_dir"]).mkdir(parents=True, exist_ok=True)
            shutil.copy(root / path, Path(config["site_dir"]) / name)
            return f'<img alt="{text}" src="{name}">'
        return f"{text} (`{path}`)" if text.strip("`") not in path else f"`{path}`"

    return LINK.sub(resolve, markdown)
