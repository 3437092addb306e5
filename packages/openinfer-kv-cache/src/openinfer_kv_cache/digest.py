"""Identity of prefixes: chained, keyed 128-bit digests.

    root      = H("openinfer-root",  version, block size, layout digest, LoRA name, cache salt)
    start     = root, or H("openinfer-weight", root, version of the weights), once they have changed
    digest[i] = H("openinfer-block", digest[i - 1], or start for i = 0, token ids of block i as uint32 LE)
    state[p]  = H("openinfer-state", digest[i], p as uint32 LE): chunk p of the recurrent states after block i
    table t's block = digest[i], its first byte XOR t: what the layers of block table t keep of the same tokens
    H(person, message) = BLAKE2b-128 with the key and the personalisation `person`

A block's digest binds every token before it and, through the root, everything else that shapes its KV. Chains
of different salts or adapters differ from the root on, so they share no digest. The key makes digests
impossible to forge: without it an attacker cannot search for tokens that collide with another tenant's (keyed
BLAKE2b is a MAC, RFC 7693 section 2.9). With a random key (the default) digests mean something in this
process only; give the same key to every process that shares a tier.
"""

import hashlib
import secrets
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NewType

from openinfer_kv_cache.errors import KvConfigError

Digest = NewType("Digest", bytes)  # 16 bytes

DIGEST_BYTES = 16
MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 64
KNOWN_GROUP_BLOCKS = 32
"""Blocks whose digests are kept together: as many as a sequence looks up at a time."""
MAX_KNOWN_GROUPS = 2**14
"""Some 35 MB of digests: of 8 million tokens at 16 a block."""
_ROOT_VERSION = b"1"


class PrefixHasher:
    """Computes the digests of one pool's blocks.

    A `key` has 16 to 64 secret bytes; None draws 32 random ones. `layout_digest` is `KvLayout.digest` of the KV that
    the digests name; empty if it never leaves the process.

    Raises:
        KvConfigError: the key's length or the block size is out of range.
    """

    __slots__ = ("_block", "_group", "_key", "_known", "_layout_digest", "_weights_version", "block_size_tokens")

    def __init__(self, block_size_tokens: int, *, key: bytes | None = None, layout_digest: str = "") -> None:
        if block_size_tokens < 1:
            raise KvConfigError(f"block_size_tokens is {block_size_tokens}; it must be at least 1")
        if key is not None and not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            raise KvConfigError(f"the digest key has {len(key)} bytes; it must have {MIN_KEY_BYTES} to {MAX_KEY_BYTES}")
        self.block_size_tokens = block_size_tokens
        self._key = secrets.token_bytes(32) if key is None else key
        self._layout_digest = layout_digest
        self._weights_version = ""
        self._block = hashlib.blake2b(digest_size=DIGEST_BYTES, key=self._key, person=b"openinfer-block")
        # Digests of groups of blocks that were computed before, by a digest of the group and what it follows: a
        # conversation's next turn needs those of all turns before it again.
        self._group = hashlib.blake2b(digest_size=DIGEST_BYTES, key=self._key, person=b"openinfer-group")
        self._known: OrderedDict[bytes, tuple[Digest, ...]] = OrderedDict()

    def remember_with(self, other: "PrefixHasher") -> None:
        """From now on each of the two finds digests that the other has computed. Both are used from one thread.

        What is found is what would be computed: a group is known by a keyed digest of its tokens and of the digest
        before it, which binds all that came before, down to the root. A hasher of another key, block size, layout or
        version of the weights finds nothing of the other's.
        """
        self._known = other._known  # noqa: SLF001 - of the same class

    def root(
        self, *, lora_name: str | None = None, adapter_digest: bytes | None = None, cache_salt: str | None = None
    ) -> Digest:
        """The start of a chain: what a prefix depends on besides its tokens.

        Of an adapter its content's digest counts, or its name where that is not known.
        """
        if adapter_digest is not None:
            lora_name = f"content {adapter_digest.hex()}"
        fields = (_ROOT_VERSION, str(self.block_size_tokens).encode(), self._layout_digest.encode())
        names = (lora_name, cache_salt)
        message = b"".join(map(_encode_field, fields)) + b"".join(map(_encode_name, names))
        root = hashlib.blake2b(message, digest_size=DIGEST_BYTES, key=self._key, person=b"openinfer-root")
        return Digest(root.digest())

    @property
    def weights_version(self) -> str:
        """What chains begin with besides their root; empty for the weights that the layout's digest names.

        Chains that were computed before it was set stay what they are: their owner forgets them.
        """
        return self._weights_version

    @weights_version.setter
    def weights_version(self, version: str) -> None:
        self._weights_version = version

    def chain(self, root: Digest, token_ids: Iterable[int]) -> list[Digest]:
        """The digests of all full blocks of `token_ids`, each a uint32 (else `OverflowError`)."""
        ids = array("I", token_ids)
        digests: list[Digest] = []
        self.extend_chain(digests, root, ids, num_blocks=len(ids) // self.block_size_tokens)
        return digests

    def extend_chain(self, digests: list[Digest], root: Digest, token_ids: "array[int]", *, num_blocks: int) -> None:
        """Appends to `digests` until it has those of the first `num_blocks` blocks of `token_ids`, which are known."""
        size = self.block_size_tokens
        encoded = encode_token_ids(token_ids[len(digests) * size : num_blocks * size])
        group_bytes, begin = 4 * size * KNOWN_GROUP_BLOCKS, 0
        while begin < len(encoded):
            end = begin + 4 * size * _to_next_group(len(digests))
            is_whole = end - begin == group_bytes and end <= len(encoded)
            parent: bytes = digests[-1] if digests else self._start(root)
            digests += (self._group_digests if is_whole else self._digests)(parent, encoded[begin:end])
            begin = end

    def _group_digests(self, parent: bytes, encoded: bytes) -> Sequence[Digest]:
        """The digests of a whole group, computed once while it is remembered."""
        group = self._group.copy()
        group.update(parent + encoded)
        key, known = group.digest(), self._known
        found = known.get(key)
        if found is not None:
            known.move_to_end(key)
            return found
        made = known[key] = tuple(self._digests(parent, encoded))
        if len(known) > MAX_KNOWN_GROUPS:
            known.popitem(last=False)
        return made

    def _digests(self, parent: bytes, encoded: bytes) -> list[Digest]:
        made: list[Digest] = []
        new_block, block_bytes = self._block.copy, 4 * self.block_size_tokens
        for start in range(0, len(encoded), block_bytes):
            block = new_block()
            block.update(parent + encoded[start : start + block_bytes])
            parent = block.digest()
            made.append(Digest(parent))
        return made

    def _start(self, root: Digest) -> bytes:
        if not self._weights_version:
            return root
        message = root + _encode_field(self._weights_version.encode())
        return hashlib.blake2b(message, digest_size=DIGEST_BYTES, key=self._key, person=b"openinfer-weight").digest()

    def state_digests(self, digest: Digest, num_chunks: int) -> list[Digest]:
        """Identities of the recurrent states at the end of the prefix that `digest` names, in chunks; no block's."""
        digests: list[Digest] = []
        for chunk in range(num_chunks):
            message = digest + chunk.to_bytes(4, "little")
            state = hashlib.blake2b(message, digest_size=DIGEST_BYTES, key=self._key, person=b"openinfer-state")
            digests.append(Digest(state.digest()))
        return digests


def _to_next_group(num_blocks: int) -> int:
    return KNOWN_GROUP_BLOCKS - num_blocks % KNOWN_GROUP_BLOCKS


def table_digest(digest: Digest, table: int) -> Digest:
    """Identity of the block of table `table` (0 .. 255) whose tokens are those of the chain's `digest`.

    In table 0 that is the digest itself. Tables of one chain never share one; other chains do as rarely as two do.
    """
    return digest if not table else Digest(bytes((digest[0] ^ table,)) + digest[1:])


def table_digests(digests: Sequence[Digest], table: int) -> Sequence[Digest]:
    """`table_digest` of each; the same object for table 0."""
    return digests if not table else [Digest(bytes((digest[0] ^ table,)) + digest[1:]) for digest in digests]


def encode_token_ids(token_ids: "array[int]", *, byteorder: str = sys.byteorder) -> bytes:
    """Little-endian uint32, on a machine of any byte order."""
    if byteorder == "little":
        return token_ids.tobytes()
    swapped = token_ids[:]
    swapped.byteswap()
    return swapped.tobytes()


def _encode_field(value: bytes) -> bytes:
    # The length comes first, so that no two lists of fields have the same bytes.
    return len(value).to_bytes(8, "little") + value


def _encode_name(name: str | None) -> bytes:
    # Absent differs from empty; `surrogatepass`, because a JSON string may hold lone surrogates.
    return b"\x00" if name is None else b"\x01" + _encode_field(name.encode("utf-8", "surrogatepass"))
