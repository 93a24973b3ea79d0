"""`minddp xray`: `minddp run`, and each rank records some steps and shows them.

minddp xray --out DIR script.py ARGS     any training script, unchanged; see `wrappers.py`
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from minddp.tools.launch.run import launch, make_parser


def main(arguments: Sequence[str]) -> int:
    """Run `minddp xray` with these arguments; returns the exit status."""
    parser = make_xray_parser()
    options = parser.parse_args(arguments)
    options.native |= options.ddp == "torch"
    one_host = options.nnodes in ("1", "1:1") and not (options.rdzv_endpoint or options.master_port)
    options.standalone |= one_host  # a free port
    return launch(parser, options)


def make_xray_parser() -> ArgumentParser:
    """The command's own options end at the script's name; what follows is the script's."""
    parser = make_parser(
        "minddp xray",
        "Record some training steps on every rank and show where their time goes: in the terminal, as a page "
        "(step.html) and to be loaded again (step.json). Options not listed under minddp and x-ray are torchrun's.",
    )
    shown = parser.add_argument_group("x-ray")
    shown.add_argument("--out", dest="xray", type=Path, help="folder for the files (%(default)s)")
    shown.add_argument("--nproc", dest="nproc_per_node", help="as --nproc-per-node (2)")
    shown.add_argument("--ddp", choices=("minddp", "torch"), help="which DDP; torch is --native")
    parser.set_defaults(nproc_per_node="2", xray=Path("runs/xray"))
    return parser
