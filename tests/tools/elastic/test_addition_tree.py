"""The tree of additions, without tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minddp.tools.elastic.addition_tree import Node, add_up, deal, sums_of

SIZES = st.integers(1, 40)


def written_out(node: Node) -> str:
    """The sum of the shares of a node as an expression with brackets."""
    if node.stop - node.first == 1:
        return str(node.first)
    left, right = node.children
    return f"({written_out(left)}+{written_out(right)})"


def test_the_tree_of_a_power_of_two_is_balanced_and_others_begin_with_one() -> None:
    assert written_out(Node(0, 8)) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert written_out(Node(0, 6)) == "(((0+1)+(2+3))+(4+5))"
    assert written_out(Node(0, 3)) == "((0+1)+2)"
    assert written_out(Node(0, 1)) == "0"


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
    values = {node: written_out(node) for node in nodes}
    assert add_up(values, shares, lambda left, right: f"({left}+{right})") == written_out(Node(0, shares))
