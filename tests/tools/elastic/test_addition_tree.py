"""The tree of additions, without tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minddp.tools.elastic.addition_tree import Node, add_up, carries, deal, sums_of

SIZES = st.integers(1, 40)


def written_out(num_shares: int) -> str:
    """The sum of all shares as an expression with brackets."""
    return add_up({Node(n, n + 1): str(n) for n in range(num_shares)}, num_shares, lambda a, b: f"({a}+{b})")


def test_the_tree_of_a_power_of_two_is_balanced_and_others_begin_with_one() -> None:
    assert written_out(8) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert written_out(6) == "(((0+1)+(2+3))+(4+5))"
    assert written_out(3) == "((0+1)+2)"
    assert written_out(1) == "0"


@given(SIZES, SIZES)
def test_every_share_is_dealt_once_and_evenly(shares: int, ranks: int) -> None:
    if ranks > shares:
        with pytest.raises(ValueError, match=f"{shares} logical ranks cannot be dealt to {ranks} ranks"):
            deal(shares, ranks)
        return
    blocks = deal(shares, ranks)
    assert [share for block in blocks for share in block] == list(range(shares))
    assert {len(block) for block in blocks} <= {shares // ranks, -(-shares // ranks)}


@given(SIZES, st.data())
def test_the_sums_of_ranks_add_up_in_one_order_however_shares_are_dealt(shares: int, data: st.DataObject) -> None:
    blocks = deal(shares, data.draw(st.integers(1, shares)))
    nodes = [node for block in blocks for node in sums_of(block, shares)]
    of_rank = {node: written_out_part(node, shares) for node in nodes}
    assert add_up(of_rank, shares, lambda a, b: f"({a}+{b})") == written_out(shares)


def written_out_part(node: Node, shares: int) -> str:
    if node.stop - node.first == 1:
        return str(node.first)
    left, right = node.children
    return f"({written_out_part(left, shares)}+{written_out_part(right, shares)})"


@given(SIZES, st.data())
def test_carrying_as_a_counter_gives_the_sums_of_a_block(shares: int, data: st.DataObject) -> None:
    block = data.draw(st.sampled_from(deal(shares, data.draw(st.integers(1, shares)))))
    held: list[Node] = []
    for share in block:
        node = Node(share, share + 1)
        for _ in range(carries(held, share, shares)):
            node = Node(held.pop().first, node.stop)
        held.append(node)
        assert len(held) <= 2 * len(block).bit_length()
    assert held == sums_of(block, shares)
