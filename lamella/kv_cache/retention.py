"""Which places in a token sequence are kept as resume points, beyond what running requests use.

In a model with sliding layers this decides whether prefixes are found again, more than the order of eviction does:
where full-attention KV has lost the window that belongs to it, no request can resume.
"""

from __future__ import annotations

from dataclasses import dataclass

from lamella.argument_checks import MOST_TOKENS, WholeRange, shown
from lamella.errors import ConfigError

RETENTION_POLICIES = ("tails", "all", "none")


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """name: which places are kept.

    "tails"  the end of each prompt, of each generation, and of what was preempted or aborted; and each place where a
             second prompt was seen to part from a first. Each is kept with its window and one block more
    "all"    every block end as well: a request can resume anywhere, at the price of keeping all sliding KV
    "none"   no place: sliding layers' prefixes are shared between running requests only

    grid_tokens: with "tails", a place every `grid_tokens` tokens (rounded up to whole blocks) as well; None: no grid.
    spare: with "tails" and "all", sliding pages that nothing keeps stay cached until memory is wanted.
    Without sliding layers every block end is a place to resume and the policies do not differ.
    """

    name: str = "tails"
    grid_tokens: int | None = None
    spare: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in RETENTION_POLICIES:
            raise ConfigError(
                f"retention={shown(self.name)} is not known; choose one of {', '.join(RETENTION_POLICIES)}"
            )
        if self.grid_tokens is not None:
            WholeRange(1, MOST_TOKENS, f"a positive number of tokens, at most {MOST_TOKENS}, or None").check(
                "retention_grid_tokens", self.grid_tokens, ConfigError
            )
        if self.grid_tokens is not None and self.name != "tails":
            raise ConfigError(
                f"retention_grid_tokens={self.grid_tokens} goes with retention='tails', not {self.name!r}"
            )

    @property
    def keeps_ends(self) -> bool:
        """Whether ends and places where prompts part are kept."""
        return self.name != "none"

    @property
    def num_blocks_more(self) -> int:
        """Number of blocks below the window that running requests leave in the tree, so that their ends can be kept
        with these. A later prompt may part inside the last block before an end, and then its window begins earlier."""
        return int(self.keeps_ends)

    @property
    def keeps_spare(self) -> bool:
        """Whether sliding pages that nothing keeps stay cached until memory is wanted."""
        return self.spare and self.keeps_ends

    @property
    def keeps_block_ends(self) -> bool:
        """Whether `keeps_block_end` is ever true."""
        return self.name == "all" or self.grid_tokens is not None

    def keeps_block_end(self, end: int, page_tokens: int) -> bool:
        """Whether the block end at position `end` is kept in any case, even if nothing ends or parts there."""
        if self.name == "all":
            return True
        return self.grid_tokens is not None and end % (-(-self.grid_tokens // page_tokens) * page_tokens) == 0
