"""The block manager as a state machine: no leak, no double owner, exact counts, and every table reads its own text."""

from array import array

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from runtime.blocks import BlockManager, BlockTable, KVCache

SIZE, BLOCKS = 4, 12
texts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class Machine(RuleBasedStateMachine):
    """Every operation of the manager on a memory of plain integers, next to the texts it should hold."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(BLOCKS, SIZE)
        self.memory = [[-1] * SIZE for _ in range(BLOCKS)]
        self.texts: dict[int, list[int]] = {}
        self.live: dict[int, BlockTable] = {}

    def write(self, table: BlockTable, tokens: list[int]) -> bool:
        before = (list(table.blocks), self.manager.free, list(self.manager.references))
        needed = self.manager.needed(table, table.length + len(tokens))
        copies = self.manager.reserve(table, table.length + len(tokens))
        if copies is None:
            assert needed > before[1]
            assert before == (table.blocks, self.manager.free, self.manager.references)
            return False
        idle_again = sum(before[2][source] == 1 for source, _ in copies)  # cached, and nobody else's: free once copied
        assert before[1] - self.manager.free == needed - idle_again
        for source, destination in copies:
            self.memory[destination] = list(self.memory[source])
        for token in tokens:
            block = table.blocks[table.length // SIZE]
            assert self.manager.references[block] == 1, "a shared block is written"
            self.memory[block][table.length % SIZE] = token
            table.length += 1
        self.texts[id(table)] += tokens
        return True

    @rule(target=tables, tokens=texts)
    def start(self, tokens: list[int]) -> BlockTable:
        table = self.manager.match(tokens, len(tokens) - 1)
        assert table.length < len(tokens) and table.length % SIZE == 0
        self.live[id(table)], self.texts[id(table)] = table, tokens[: table.length]
        self.write(table, tokens[table.length :])
        return table

    @rule(table=tables, tokens=texts)
    def append(self, table: BlockTable, tokens: list[int]) -> None:
        self.write(table, tokens)

    @rule(table=tables)
    def publish(self, table: BlockTable) -> None:
        self.manager.publish(table, self.texts[id(table)])

    @rule(target=tables, table=tables)
    def fork(self, table: BlockTable) -> BlockTable:
        twin = self.manager.fork(table)
        self.live[id(twin)], self.texts[id(twin)] = twin, list(self.texts[id(table)])
        return twin

    @rule(table=tables, drop=st.integers(1, 9))
    def truncate(self, table: BlockTable, drop: int) -> None:
        length = max(0, table.length - drop)
        self.manager.truncate(table, length)
        del self.texts[id(table)][length:]

    @rule(table=consumes(tables))
    def release(self, table: BlockTable) -> None:
        self.manager.release(table)
        assert table == BlockTable()
        del self.live[id(table)], self.texts[id(table)]

    @rule()
    def forget(self) -> None:
        self.manager.forget()

    @invariant()
    def counts_are_exact(self) -> None:
        owners = [0] * BLOCKS
        for table in self.live.values():
            assert len(set(table.blocks)) == len(table.blocks)
            for block in table.blocks:
                owners[block] += 1
        assert owners == self.manager.references
        blank, idle = self.manager._blank, list(self.manager._idle)
        assert len(blank) == len(set(blank)) and not set(blank) & set(idle)
        assert sorted(blank + idle) == [b for b in range(BLOCKS) if owners[b] == 0]
        assert self.manager.free == len(blank) + len(idle)

    @invariant()
    def every_table_reads_its_text(self) -> None:
        for key, table in self.live.items():
            stored = [self.memory[table.blocks[i // SIZE]][i % SIZE] for i in range(table.length)]
            assert stored == self.texts[key]

    @invariant()
    def cached_blocks_hold_what_their_digest_says(self) -> None:
        known = self.manager._known
        assert len(known) == len(set(known.values()))
        assert all(self.manager._digest[block] == digest for digest, block in known.items())


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def filled(manager: BlockManager, tokens: list[int]) -> BlockTable:
    table = manager.match(tokens, len(tokens) - 1)
    assert manager.reserve(table, len(tokens)) is not None
    table.length = len(tokens)
    manager.publish(table, tokens)
    return table


def test_equal_blocks_after_different_prefixes_are_different() -> None:
    manager = BlockManager(8, 2)
    filled(manager, [1, 1, 5, 5, 0])
    assert manager.match([2, 2, 5, 5, 0], 4).length == 0
    assert manager.match([1, 1, 5, 5, 9], 4).length == 4


def test_the_oldest_unused_prefix_is_evicted_first_and_its_end_before_its_start() -> None:
    manager = BlockManager(6, 2)
    first, second = filled(manager, [1, 1, 1, 1, 1]), filled(manager, [2, 2, 2, 2, 2])
    manager.release(first)
    manager.release(second)
    assert manager.free == 6
    other = BlockTable()
    manager.reserve(other, 6)  # two blanks (the unfinished blocks) and one evicted: the end of the first text
    assert manager.match([1, 1, 1, 1, 1], 4).length == 2
    assert manager.match([2, 2, 2, 2, 2], 4).length == 4


def test_a_whole_cached_prompt_still_leaves_a_token_to_run() -> None:
    manager = BlockManager(8, 4)
    filled(manager, [7] * 8)
    assert manager.match([7] * 8, 7).length == 4


def test_a_write_after_truncation_into_a_published_block_copies_it() -> None:
    manager = BlockManager(4, 4)
    table = filled(manager, [3] * 8)
    published = list(table.blocks)
    manager.truncate(table, 6)
    assert manager.reserve(table, 7) == [(published[1], table.blocks[1])]
    assert manager.match([3] * 9, 8).blocks == published


def test_copies_run_in_order_over_all_layers_and_both_sides() -> None:
    import torch

    cache = KVCache(2, 4, 1, 2, 2)
    cache.k[:] = torch.arange(4.0)[None, :, None, None, None]
    cache.v[:] = -cache.k
    cache.copy([(0, 1), (3, 0), (1, 2)])
    assert cache.k[:, :, 0, 0, 0].tolist() == [[3, 0, 0, 3]] * 2 and torch.equal(cache.v, -cache.k)


def test_the_digest_does_not_depend_on_the_kind_of_sequence() -> None:
    manager = BlockManager(4, 2)
    filled(manager, [1, 2, 3])
    assert manager.match(array("i", [1, 2, 9]), 2).length == 2
