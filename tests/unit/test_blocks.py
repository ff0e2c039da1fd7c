"""KV blocks against a model that keeps every token: who reads what, who writes where, none lost.

Each place of the toy pool holds what a real one would be worth: the whole history up to its token.
So a block that is shared, copied, given up or written to wrongly shows in what a sequence reads.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import pytest
from spikeinfer.runtime.blocks import BlockPool, BlockTable
from spikeinfer.runtime.prefix_cache import next_key, root_key

BLOCK, BLOCKS = 4, 24
LIVE = 8  # sequences at most


@dataclass
class Sequence:
    """One sequence of the model: its table, its salt, its tokens, and how many are written."""

    table: BlockTable
    salt: str
    tokens: list[int] = field(default_factory=list)
    computed: int = 0

    def history(self) -> list[int]:
        """What each token's place is worth: a number for everything up to it."""
        return list(accumulate(self.tokens, lambda before, token: hash((before, token)),
                               initial=hash(self.salt)))[1:]  # fmt: skip


class PoolDriver:
    """Random operations on a pool, every one followed by checks.

    Args:
        seed: of the operations.
        recent: recent blocks of a sequence; together they hold its last, unfinished block.
    """

    def __init__(self, seed: int, recent: int = 0) -> None:
        self.random = random.Random(seed)
        self.pool = BlockPool(BLOCKS, BLOCK, recent)
        self.memory = [[0] * BLOCK for _ in range(BLOCKS)]
        self.live: list[Sequence] = []
        self.seen: Counter[str] = Counter()

    def run(self, operations: int) -> None:
        """Any operations, in any order; then all sequences end, and every block is there again."""
        for number in range(operations):
            name = self.random.choice(("alloc", "alloc", "append", "append", "fork", "free"))
            getattr(self, name)()
            self.check_counts()
            for sequence in self.live if number % 50 == 0 else self.live[-2:]:
                self.check_contents(sequence)
        while self.live:
            self.free()
        assert (self.pool.owned, self.pool.available) == (0, BLOCKS)

    def alloc(self) -> None:
        """A prompt of few different ones, so that many begin alike."""
        if len(self.live) == LIVE:
            return
        salt = self.random.choice(("", "", "a"))
        kind, length = self.random.randrange(3), self.random.randint(1, 20)
        tokens = [(kind * i) % 3 for i in range(length - 1)] + [self.random.randrange(3)]
        sequence = Sequence(self.pool.table(salt), salt, tokens)
        sequence.computed = sequence.table.adopt(tokens)
        self.seen["hit"] += sequence.computed > 0
        self.live.append(sequence)
        if not self.write(sequence, len(tokens)):
            self.live.remove(sequence)
            sequence.table.release()

    def append(self) -> None:
        if self.live:
            sequence = self.random.choice(self.live)
            count = self.random.randint(1, 6)
            new = [self.random.randrange(2) for _ in range(count)]
            sequence.tokens += new
            if not self.write(sequence, len(sequence.tokens)):
                del sequence.tokens[-count:]

    def fork(self) -> None:
        if 0 < len(self.live) < LIVE:
            old = self.random.choice(self.live)
            tokens = list(old.tokens)
            self.live.append(Sequence(old.table.fork(), old.salt, tokens, old.computed))

    def free(self) -> None:
        if self.live:
            sequence = self.live.pop(self.random.randrange(len(self.live)))
            sequence.table.release()
            sequence.table.release()  # twice is once

    def write(self, sequence: Sequence, stop: int) -> bool:
        """What a step does; False and no change when there is no room."""
        table, start, evicted = sequence.table, sequence.computed, self.pool.evicted
        if table.missing(start, stop) > self.pool.available:
            before = table.ids.tolist(), self.pool.available
            with pytest.raises(ValueError, match="are missing"):
                table.grow(start, stop)
            assert (table.ids.tolist(), self.pool.available) == before
            self.seen["full"] += 1
            return False
        missing = table.missing(start, stop)
        copies = table.grow(start, stop)
        assert table.missing(start, stop) == 0
        assert missing >= len(copies)
        for source, destination in copies:
            self.memory[destination] = list(self.memory[source])
        self.seen["copy"] += len(copies)
        self.store(sequence, start, stop)
        owned = self.pool.owned
        table.commit(sequence.tokens, stop)
        sequence.computed = stop
        self.seen["merge"] += owned > self.pool.owned
        self.seen["evict"] += self.pool.evicted > evicted
        return True

    def store(self, sequence: Sequence, start: int, stop: int) -> None:
        table, lead = sequence.table, self.pool.recent_blocks
        history = sequence.history()
        for at, slot in zip(range(start, stop), table.slots(start, stop).tolist(), strict=True):
            assert self.pool.writable(slot // BLOCK)
            value = history[at]
            self.memory[slot // BLOCK][slot % BLOCK] = value
            for block in table.ids[:lead].tolist():
                assert self.pool.writable(block)
                self.memory[block][at % BLOCK] = value

    def check_contents(self, sequence: Sequence) -> None:
        """Every token is where its table says, and the unfinished block in the recent ones."""
        table, lead, computed = sequence.table, self.pool.recent_blocks, sequence.computed
        expected = sequence.history()[:computed]
        slots = table.slots(0, computed).tolist()
        assert [self.memory[slot // BLOCK][slot % BLOCK] for slot in slots] == expected
        unfinished = computed // BLOCK * BLOCK
        for block in table.ids[:lead].tolist():
            assert self.memory[block][: computed - unfinished] == expected[unfinished:]

    def check_counts(self) -> None:
        """Owners are counted right; a block is blank, owned or resting; none is lost."""
        pool = self.pool
        held = Counter(block for s in self.live for block in s.table.ids.tolist())
        assert all(pool.owners(block) == held[block] for block in range(BLOCKS))
        assert pool.owned == len(held)
        assert pool.available == BLOCKS - len(held)
        for block, owners in held.items():
            assert not (owners > 1 and pool.writable(block))


@pytest.mark.parametrize("recent", [0, 2])
def test_any_order_of_operations(recent: int) -> None:
    driver = PoolDriver(recent, recent)
    driver.run(2500)
    assert min(driver.seen[what] for what in ("hit", "full", "copy", "merge", "evict")) > 5


def test_slots_follow_the_blocks() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.table(), pool.table()
    second.grow(0, 5)
    first.grow(0, 1)
    second.grow(5, 9)
    assert second.ids.tolist() == [0, 1, 3]
    assert second.slots(2, 9).tolist() == [2, 3, 4, 5, 6, 7, 12]
    assert second.slots(8, 9).tolist() == [12]
    assert second.slots(0, 9).dtype == np.int32


def test_recent_blocks_lead_the_table_and_hold_no_slots() -> None:
    table = BlockPool(8, 4, recent_blocks=2).table()
    assert table.missing(0, 5) == 4
    table.grow(0, 5)
    assert table.ids.tolist() == [0, 1, 2, 3]
    assert table.slots(2, 5).tolist() == [10, 11, 12]
    assert table.slots(4, 5).tolist() == [12]
    table.grow(5, 9)
    assert table.slots(8, 9).tolist() == [16]


def written(pool: BlockPool, tokens: list[int], salt: str = "") -> BlockTable:
    """A table with these tokens computed."""
    table = pool.table(salt)
    table.grow(table.adopt(tokens), len(tokens))
    table.commit(tokens, len(tokens))
    return table


def test_a_step_copies_nothing_and_a_fork_only_its_unfinished_block() -> None:
    pool = BlockPool(12, 4, recent_blocks=1)
    table = pool.table()
    tokens = list(range(11))
    for stop in range(1, 11):
        assert table.grow(stop - 1, stop) == []
        table.commit(tokens, stop)
    twin = table.fork()
    assert pool.owned == 4
    copies = twin.grow(10, 11)  # who writes first copies: the recent block and the third of tokens
    assert [source for source, _ in copies] == [table.ids[0], table.ids[3]]
    assert table.grow(10, 11) == []  # it is the only owner now
    assert table.ids[1:3].tolist() == twin.ids[1:3].tolist()
    whole = written(pool, list(range(50, 58)))
    assert [s for s, _ in whole.fork().grow(8, 9)] == [whole.ids[0]]  # no block is unfinished


def test_a_prefix_is_found_up_to_the_last_full_block_before_the_last_token() -> None:
    pool, tokens = BlockPool(12, 4), list(range(12))
    written(pool, tokens).release()
    assert (pool.owned, pool.resting) == (0, 3)
    for length, found in ((13, 12), (12, 8), (9, 8), (8, 4), (4, 0)):
        assert pool.table().adopt([*tokens, 99][:length]) == found
    assert pool.table().adopt([1, *tokens]) == 0
    assert pool.table().adopt([*tokens[:4], 99, *tokens[5:]]) == 4


def test_another_salt_finds_nothing() -> None:
    pool, tokens = BlockPool(12, 4), list(range(9))
    written(pool, tokens, "one").release()
    assert [pool.table(salt).adopt(tokens) for salt in ("", "two", "one")] == [0, 0, 8]


def test_equal_blocks_become_one() -> None:
    pool, tokens = BlockPool(12, 4), list(range(8))
    first, second = pool.table(), pool.table()
    for table in (first, second):
        table.grow(0, 8)
    first.commit(tokens, 8)
    second.commit(tokens, 7)
    assert pool.owned == 3
    second.commit(tokens, 8)
    assert first.ids.tolist() == second.ids.tolist()
    assert pool.owned == 2


def test_the_end_of_the_longest_unused_text_is_given_up_first() -> None:
    pool, given_up = BlockPool(4, 4), []
    pool.on_evict = lambda block, key: given_up.append(key)
    old, new = list(range(8)), list(range(50, 58))
    written(pool, old).release()
    written(pool, new).release()
    assert pool.table().adopt([*old, 0]) == 8  # used again; its table was dropped, not released
    written(pool, list(range(90, 98))).release()
    first = next_key(root_key(), new[:4])
    assert given_up == [next_key(first, new[4:]), first]
    assert pool.evicted == 2


def test_a_cleared_cache_finds_nothing_and_takes_nothing_away() -> None:
    pool, tokens = BlockPool(12, 4), list(range(9))
    written(pool, tokens).release()
    running = written(pool, [*tokens[:4], 50, 51, 52, 53, 54])
    pool.clear_cache()
    assert (pool.resting, pool.owned, pool.available) == (0, 3, 9)
    assert pool.table().adopt(tokens) == 0
    running.grow(9, 13)
    running.commit([*tokens[:4], 50, 51, 52, 53, 54, 55, 56, 57, 58], 13)
    running.release()
    assert (pool.resting, pool.available) == (1, 12)  # the third block, committed since


def test_a_pool_that_does_not_share() -> None:
    pool, tokens = BlockPool(12, 4, shares=False), list(range(9))
    table = written(pool, tokens)
    with pytest.raises(ValueError, match="belong to one sequence"):
        table.fork()
    table.release()
    assert (pool.resting, pool.table().adopt(tokens)) == (0, 0)


def test_misuse_is_noticed() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(ValueError, match="not owned"):
        pool.give_back(0)
    table = written(pool, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="is committed"):
        table.grow(3, 5)
    with pytest.raises(ValueError, match="2 blocks are missing, 1 available"):
        table.grow(4, 9)


@pytest.mark.parametrize(("block", "limit"), [(16, 0.02), (32, 0.04)])
def test_little_of_the_pool_is_wasted(block: int, limit: float) -> None:
    """Places without a token in owned blocks, over the life of 300 conversations.

    Lengths are those of published chat traces in shape: log-normal, medians of 200 tokens in and
    250 out, long tails (a mean of about 330 and 410).
    """
    rng = np.random.default_rng(0)
    prompts = np.minimum(rng.lognormal(np.log(200), 1.0, 300), 4000).astype(int) + 1
    outputs = np.minimum(rng.lognormal(np.log(250), 1.0, 300), 4000).astype(int) + 1
    pool = BlockPool(300 * 8001 // block, block)
    owned = used = 0
    for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True):
        table = pool.table()
        for length in range(prompt, prompt + output, 16):
            table.grow(max(0, length - 16) if length > prompt else 0, length)
            owned += pool.owned * block
            used += length
        table.release()
    assert 1 - used / owned < limit
