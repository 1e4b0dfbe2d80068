"""Hooks of the documentation site: pages that live at the root, and links that lead out of ``docs/``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
# Pages of the site that a reader of the repository looks for at its root.
FROM_THE_ROOT = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security-reports.md": "SECURITY.md",
}
ROOT_LINKS = {"](docs/": "](", **{f"]({source}": f"]({name}" for name, source in FROM_THE_ROOT.items()}}
LINK = re.compile(r"\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root, with their links as the site has them."""
    for name, source in FROM_THE_ROOT.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        for of_root, of_site in ROOT_LINKS.items():
            text = text.replace(of_root, of_site)
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: object) -> str:
    """Leave only the text of links to code and other files that are no pages: the site does not hold them."""
    docs = Path(config.docs_dir).resolve()

    def kept(match: re.Match[str]) -> str:
        target = match[2].partition("#")[0]
        inside = (docs / page.file.src_uri).parent / target
        is_page = target.endswith(".md") and inside.resolve().is_relative_to(docs)
        return match[0] if is_page else match[1]

    return LINK.sub(kept, markdown)


def on_page_content(html: str, *, page: Any, **_: object) -> str:
    """Refuse a page that shows how a field is made, in place of what it is (``described_fields``)."""
    if "documented(" in re.sub(r"<[^>]+>", "", html):
        raise PluginError(f"{page.file.src_uri} shows a call of documented(): tools/docs/described_fields.py missed it")
    return html
