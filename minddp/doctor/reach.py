"""Who can open a connection to whom? Each rank listens where gloo would, and knocks at all others' doors.

gloo connects every pair of ranks in one direction only, and when it fails it names an address, not a reason. Here
both directions of all pairs are tried, all at once, and the address comes with the rank that has it.
"""

from __future__ import annotations

import asyncio

from minddp.doctor.board import Board
from minddp.doctor.meeting import classify

_KNOCK_TIMEOUT_S = 4.0


def knock_at_all(board: Board, address: str, timeout_s: float) -> dict[str, str]:
    """Try to connect to each other rank, while they try to connect here at `address`.

    Returns, by rank as text, why not: an empty text where it worked.
    """
    return asyncio.run(_knock_at_all(board, address, timeout_s))


async def _knock_at_all(board: Board, address: str, timeout_s: float) -> dict[str, str]:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), address, 0)
    async with server:
        board.post("door", [address, server.sockets[0].getsockname()[1]])
        doors = await asyncio.to_thread(board.gather, "door", timeout_s)
        others = [rank for rank in range(board.world_size) if rank != board.rank]
        reasons = await asyncio.gather(*(_knock(doors.get(rank)) for rank in others))
        board.post("knocked", True)
        await asyncio.to_thread(board.gather, "knocked", timeout_s)  # keep the door open until all have knocked
    return {str(rank): reason for rank, reason in zip(others, reasons, strict=True)}


async def _knock(door: tuple[str, int] | None) -> str:
    """Why one cannot connect there; empty if one can."""
    if door is None:
        return "did not open a door"
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(*door), _KNOCK_TIMEOUT_S)
    except (asyncio.TimeoutError, TimeoutError):
        return "no answer"
    except OSError as error:
        return classify(error)
    writer.close()
    return ""
