"""The page: one HTML file that holds everything and needs no network.

`payload.py` prepares the data. `page.html` and `page.css` are the structure and the look. The scripts draw it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from minddp.tools.xray.analysis import Analysis
from minddp.tools.xray.page.payload import payload

# One script in the page: each file may use what the files before it define.
SCRIPTS = ("elements.js", "state.js", "chart.js", "timeline.js", "panels.js")


def render(analyses: Sequence[Analysis]) -> str:
    """The page that shows these recordings, one below the other.

    Raises:
        ValueError: one of them holds no step.
    """
    data = payload(analyses)
    parts = {
        "TITLE": escape(" / ".join(exhibit["title"] for exhibit in data["exhibits"])),
        "CSS": _text("page.css"),
        # "</" would end the script element, whatever the JSON means by it.
        "DATA": json.dumps(data, separators=(",", ":")).replace("</", "<\\/"),
        "JS": "\n".join(map(_text, SCRIPTS)),
    }
    # In one pass: a parameter may be called "{{JS}}".
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], _text("page.html"))


def _text(name: str) -> str:
    return files("minddp.tools.xray.page").joinpath(name).read_text(encoding="utf-8")
