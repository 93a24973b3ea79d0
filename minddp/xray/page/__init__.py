"""The page: one HTML file that holds everything and asks no network for anything.

`payload.py` decides what there is to show; `page.js` draws it; `page.css` says how that looks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from minddp.xray.analysis import Analysis
from minddp.xray.page.payload import payload


def render(analyses: Sequence[Analysis]) -> str:
    """The page that shows these recordings, one below the other.

    Raises:
        ValueError: one of them holds no step.
    """
    folder = files("minddp.xray.page")
    data = payload(analyses)
    parts = {
        "TITLE": escape(" / ".join(exhibit["title"] for exhibit in data["exhibits"])),
        "CSS": folder.joinpath("page.css").read_text(),
        # "</" would end the script element, whatever the JSON means by it.
        "DATA": json.dumps(data, separators=(",", ":")).replace("</", "<\\/"),
        "JS": folder.joinpath("page.js").read_text(),
    }
    html = folder.joinpath("page.html").read_text()
    for name, text in parts.items():
        html = html.replace(f"{{{{{name}}}}}", text)
    return html
