"""KV blocks: no block with two owners, none lost, promises kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from spikeinfer.runtime.blocks import BlockPool, BlockTable

BLOCK, BLOCKS = 4, 12


class PoolMachine(RuleBasedStateMachine):
    """Tables that come, grow and go in any order, against plain sets."""

    recent = 0
    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, BLOCK, self.recent)
        self.live: list[tuple[BlockTable, int]] = []

    @rule(target=tables, tokens=st.integers(1, BLOCK * BLOCKS + 4))
    def promise(self, tokens: int) -> BlockTable | None:
        table = self.pool.promise(tokens)
        assert (table is not None) == (self.promised() + self.needs(tokens) <= BLOCKS)
        if table is not None:
            self.live.append((table, tokens))
        return table

    @rule(table=tables, share=st.floats(0, 1))
    def grow(self, table: BlockTable | None, share: float) -> None:
        if table is None:
            return
        most = next(most for live, most in self.live if live is table)
        table.grow(int(share * most))  # a promise is always kept

    @rule(table=consumes(tables))
    def release(self, table: BlockTable | None) -> None:
        if table is None:
            return
        table.release()
        table.release()  # twice is once
        self.live = [(live, most) for live, most in self.live if live is not table]

    @invariant()
    def no_block_has_two_owners_and_none_is_lost(self) -> None:
        owned = [block for table, _ in self.live for block in table.ids.tolist()]
        assert len(set(owned)) == len(owned) == self.pool.owned
        assert all(0 <= block < BLOCKS for block in owned)
        assert self.pool.unpromised == BLOCKS - self.promised()

    def needs(self, tokens: int) -> int:
        return self.recent + -(-tokens // BLOCK)

    def promised(self) -> int:
        return sum(self.needs(most) for _, most in self.live)


class RecentPoolMachine(PoolMachine):
    """The same with two blocks that each sequence owns besides."""

    recent = 2


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestRecentPool = RecentPoolMachine.TestCase
TestRecentPool.settings = TestPool.settings


def test_slots_follow_the_blocks() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.promise(4), pool.promise(9)
    assert first is not None
    assert second is not None
    second.grow(5)
    first.grow(1)
    second.grow(9)
    assert second.ids.tolist() == [0, 1, 3]
    assert second.slots(2, 9).tolist() == [2, 3, 4, 5, 6, 7, 12]
    assert second.slots(8, 9).tolist() == [12]
    assert second.slots(0, 9).dtype == np.int32


def test_recent_blocks_lead_the_table_and_hold_no_slots() -> None:
    table = BlockPool(8, 4, recent_blocks=2).promise(9)
    assert table is not None
    assert table.capacity == 12
    table.grow(5)
    assert table.ids.tolist() == [0, 1, 2, 3]
    assert table.slots(2, 5).tolist() == [10, 11, 12]
    assert table.slots(4, 5).tolist() == [12]
    table.grow(9)
    assert table.slots(8, 9).tolist() == [16]


def test_growing_past_the_promise_is_refused() -> None:
    table = BlockPool(4, 4).promise(5)
    assert table is not None
    assert table.capacity == 8
    table.grow(8)
    with pytest.raises(ValueError, match="9 tokens do not fit in the promised 8"):
        table.grow(9)


def test_a_block_given_back_twice_is_noticed() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(ValueError, match="not all owned"):
        pool.give_back([0], 0)
