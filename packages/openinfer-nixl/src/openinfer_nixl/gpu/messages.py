"""What peers of the tier `nixl-gpu` say to each other, after both have shown the token: a batch of blocks a question.

client ─► Count | Lease | GiveBack     one at a time
server ─► Described, first of all; then Counted | Leased | GivenBack
"""

from typing import Annotated, TypeAlias

import msgspec

from openinfer_nixl.messages import Described, GiveBack, GivenBack, Number

PROTOCOL = b"openinfer nixl-gpu 1"
MOST_COUNTED = 1 << 20
MOST_LEASED = 1024

Bytes16: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Count(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    """How many of a chain's first blocks there are."""

    digests: Annotated[tuple[Bytes16, ...], msgspec.Meta(max_length=MOST_COUNTED)]


class Lease(msgspec.Struct, frozen=True, array_like=True, tag="lease"):
    """Those of a chain's first blocks that there are, are to stay where they are."""

    digests: Annotated[tuple[Bytes16, ...], msgspec.Meta(max_length=MOST_LEASED)]


class Counted(msgspec.Struct, frozen=True, array_like=True, tag="counted"):
    """Answers `Count`."""

    num_blocks: Number


class LeasedBlock(msgspec.Struct, frozen=True, array_like=True):
    """Where a block is, in the address space of the server, and the sum of its bytes, as `BlockMover` makes it."""

    address: Number
    sum: Bytes16


class Leased(msgspec.Struct, frozen=True, array_like=True, tag="leased"):
    """Answers `Lease`: a beginning of what was asked for, maybe empty."""

    lease_id: Number
    blocks: Annotated[tuple[LeasedBlock, ...], msgspec.Meta(max_length=MOST_LEASED)]


Question: TypeAlias = Count | Lease | GiveBack
Answer: TypeAlias = Described | Counted | Leased | GivenBack

questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
