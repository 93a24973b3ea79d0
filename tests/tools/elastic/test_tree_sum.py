"""The tree of additions, without tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minddp.tools.elastic.tree_sum import append, deal

SIZES = st.integers(1, 40)


def added(values: list[tuple[range, str]], num_shares: int) -> list[tuple[range, str]]:
    """The sums that are left of these values, as expressions with brackets."""
    sums: list[tuple[range, str]] = []
    for shares, value in values:
        append(sums, shares, value, num_shares, lambda left, right: f"({left}+{right})")
    return sums


def sums_of(block: range, num_shares: int) -> list[tuple[range, str]]:
    return added([(range(share, share + 1), str(share)) for share in block], num_shares)


@pytest.mark.parametrize(
    ("num_shares", "total"),
    [(8, "(((0+1)+(2+3))+((4+5)+(6+7)))"), (6, "(((0+1)+(2+3))+(4+5))"), (3, "((0+1)+2)"), (1, "0")],
)
def test_the_tree_of_a_power_of_two_is_balanced_and_others_begin_with_one(num_shares: int, total: str) -> None:
    assert sums_of(range(num_shares), num_shares) == [(range(num_shares), total)]


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
    of_ranks = [one for block in blocks for one in sums_of(block, shares)]
    assert added(of_ranks, shares) == sums_of(range(shares), shares)
    assert len(sums_of(range(shares), shares)) == 1
