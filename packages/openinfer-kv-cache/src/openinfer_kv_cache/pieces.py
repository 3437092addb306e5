"""How the layers of groups with windows are cut into pieces, so that one block of one size holds any of them.

    Gemma-3 12B: 8 layers that see everything, 40 that see 1024 tokens; pieces of at most 8 layers

    table   0              1         2          3          4          5
    layers  global 0 .. 7  local 0.. local 8 .. local 16.. local 24.. local 32 .. 39

Each piece has a block table of its own, and a block holds one piece of its tokens. Small blocks leave little memory
unused where a group's layers do not divide evenly; large ones need few tables. So of all sizes the one counts that
needs the fewest bytes per token, where every table costs two percent more: a step writes its cache slots and tables.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_FEW_TABLES = 8
_TABLES_OF_DOUBLE_COST = 50


class LayerGroup(NamedTuple):
    """Layers of one kind."""

    num_layers: int
    layer_bytes: int
    """Of one layer in one block."""

    def num_pieces(self, block_bytes: int) -> int:
        return -(-self.num_layers // (block_bytes // self.layer_bytes))


def choose_block_bytes(groups: Sequence[LayerGroup], *, align_bytes: int) -> int:
    """The size of blocks that each hold as many whole layers of one group as fit.

    At most eight tables, if any size needs so few; among those the least `tables * bytes * (1 + tables / 50)`.
    """
    return min(_candidates(groups, align_bytes), key=lambda block_bytes: _cost(groups, block_bytes))


def _candidates(groups: Sequence[LayerGroup], align_bytes: int) -> Iterable[int]:
    least_bytes = max(group.layer_bytes for group in groups)
    sizes = {count * group.layer_bytes for group in groups for count in range(1, group.num_layers + 1)}
    return sorted({-(-size // align_bytes) * align_bytes for size in sizes if size >= least_bytes})


def _cost(groups: Sequence[LayerGroup], block_bytes: int) -> tuple[bool, int, int]:
    num_tables = sum(group.num_pieces(block_bytes) for group in groups)
    return num_tables > _FEW_TABLES, num_tables * block_bytes * (_TABLES_OF_DOUBLE_COST + num_tables), num_tables
