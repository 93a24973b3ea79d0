"""Replace the outputs on docs/stuck.md by real ones: `python -m tests.doctor.stuck_page`, some minutes.

A block of the page that follows `<!-- played: NAME -->` shows what the scenario NAME of `tests/watchdog/stuck.py`
had a waiting rank report last, and raise; one that follows `<!-- ran: COMMAND -->` what the command printed.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.watchdog.test_stuck import play

PAGE = Path(__file__).parent.parent.parent / "docs" / "stuck.md"
_BLOCK = re.compile(r"<!-- (played|ran): (.+?) -->\n+```text\n(.*?)```\n", re.DOTALL)
_WHILE_WRAPPING = "idle, backward 0;"  # reports of a machine that is slow to start, not of the scenario


def blocks(page: str) -> dict[str, str]:
    """The page's outputs by scenario or command."""
    return {name: output for _, name, output in _BLOCK.findall(page)}


def main(wanted: Sequence[str]) -> None:
    """Fill in the blocks named, by default all."""
    page = PAGE.read_text()
    outputs = blocks(page)
    for kind, name, _ in _BLOCK.findall(page):
        if wanted and name not in wanted:
            continue
        print(f"{kind} {name}", flush=True)
        outputs[name] = excerpt(play(name)) if kind == "played" else printed_by(name)
    PAGE.write_text(filled(page, outputs))


def filled(page: str, outputs: Mapping[str, str]) -> str:
    def block(match: re.Match[str]) -> str:
        kind, name, _ = match.groups()
        return f"<!-- {kind}: {name} -->\n\n```text\n{outputs[name]}```\n"

    return _BLOCK.sub(block, page)


def excerpt(outcome_of_rank: Mapping[int, str]) -> str:
    """The last warning and the error of the first rank that got stuck; of rank 0, if all went on in the end."""
    stuck = [output for _, output in sorted(outcome_of_rank.items()) if output.startswith("Stuck: ")]
    ended, _, reports = (stuck or [outcome_of_rank[0]])[0].partition("\nreports:")
    warnings = [text for text in reports.split("\nWaited") if text and _WHILE_WRAPPING not in text]
    shown = [f"Waited{text.rstrip()}" for text in warnings[-1:]] + ([ended] if stuck else [])
    if not shown:
        raise RuntimeError(f"No rank got stuck: {dict(outcome_of_rank)}")
    return anonymous("\n\n".join(shown)) + "\n"


def printed_by(command: str) -> str:
    """What a shell shows; `minddp` is the one of this interpreter."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, shell=True, env=environment, stdout=subprocess.PIPE, text=True, timeout=200)
    return "".join(f"{line.rstrip()}\n" for line in anonymous(done.stdout).splitlines())


def anonymous(output: str) -> str:
    """Without the name of this host, and without the folders that torch was built in."""
    named = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node1", output)
    return re.sub(r"\[/\S+/third_party/gloo/", "[", named)


if __name__ == "__main__":
    main(sys.argv[1:])
