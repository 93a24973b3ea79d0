"""Called by MkDocs: which pages there are, and links from pages to source files, which become annotated pages."""

from __future__ import annotations

import posixpath
import re
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.site import annotated
from docs.site.annotated import NOTE, ROOT

LINK = re.compile(r"(?<!!)\[(?P<text>`[^`]+`|[^\]`]+)\]\((?P<target>[^)#\s:]+)(?P<anchor>#[^)]*)?\)")
LISTS = ("docs/learning/README.md", "docs/README.md")  # what they link is in the navigation, in that order
RECORDED = f"{annotated.STEP}.md"


def pages() -> list[str]:
    return [str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")))]


@cache
def linked(page: str) -> list[str]:
    """The files of the repository that a page links or shows, in order."""
    return [resolved(page, target) for target in re.findall(r"\]\(([^)#\s:]+)", (ROOT / page).read_text())]


def resolved(page: str, target: str) -> str:
    """From the root; a package stands for its `__init__.py`."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return f"{path}/__init__.py" if (ROOT / path / "__init__.py").is_file() else path


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    first, rest = ([page for page in dict.fromkeys(linked(one)) if page.endswith(".md")] for one in LISTS)
    rest = [page for page in rest if page not in (*first, *LISTS, "README.md", "docs/api.md")]
    sources = [
        {f"{folder}/": [{file.removeprefix(f"{folder}/"): f"{file}.md"} for file in annotated.files(folder)]}
        for folder in annotated.FOLDERS
    ]
    tabs = {"Learning": [LISTS[0], *first], "Documentation": [LISTS[1], *rest], "Source": [RECORDED, *sources]}
    config.nav = ["README.md", *({name: pages} for name, pages in tabs.items()), {"API": "docs/api.md"}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    targets = {target for page in pages() for target in linked(page) if (ROOT / target).is_file()}
    sources = {target for target in targets if target.endswith(".py")} | {*annotated.files("minddp", "reference")}
    for path in sorted(targets - sources | {*pages()}):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for file in sorted(sources):
        head = f"---\ntitle: {Path(file).name}\nsource: {file}\nhide: [navigation, toc]\n---\n"
        files.append(File.generated(config, f"{file}.md", content=head))
    files.append(File.generated(config, RECORDED, content="# One recorded step of two ranks\n"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to source files lead to their pages, and where the text is a name, to what it names."""

    def to_source(found: re.Match[str]) -> str:
        path, anchor = resolved(page.file.src_uri, found["target"]), found["anchor"] or ""
        if not (ROOT / path).is_file():  # a folder without a page, or no path
            return found["text"] if (ROOT / path).is_dir() else found[0]
        if path.endswith(".py"):
            name = found["text"].strip("`").removesuffix("()")
            anchor = f"#{annotated.id_of(name)}" if NOTE.fullmatch(name) else anchor
            anchor = f"#{name}" if name in annotated.defined_in(path) else anchor
            path += ".md"
        return f"[{found['text']}]({posixpath.relpath(path, posixpath.dirname(page.file.src_uri))}{anchor})"

    return LINK.sub(to_source, markdown.replace("<details>", '<details markdown="1">'))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == RECORDED:
        return html + annotated.whole_step()
    return annotated.page(page.meta["source"]) if "source" in page.meta else html
