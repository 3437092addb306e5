"""`Tokenizer`: a model folder's tokenizer as the server needs it.

Long texts are encoded in a thread with `encode_batch_fast`, which releases the interpreter lock; `encode` would hold
it for the whole text and stall every stream (FRONTEND-CHOICES.md: 37-68 ms for 16k tokens).
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import decoders, normalizers

from openinfer_core.errors import BrokenPlugin, InvalidCheckpoint
from openinfer_core.request import NamedBeginning
from openinfer_core.tokenizer_files import TOKENIZER_FILE, read_tokenizer
from openinfer_server.errors import UnusableTokenizer
from openinfer_server.limits.queued_work import Client
from openinfer_server.text.byte_table import ByteTable, SentencePieces, build_byte_table
from openinfer_server.text.control_tokens import BegunEncoding, ControlTokens
from openinfer_server.text.detokenizers import ByteDetokenizer, Detokenizer, WindowDetokenizer
from openinfer_server.text.encoding_threads import THIS_PROCESS, EncodingThreads
from openinfer_server.text.known_prefixes import DEFAULT_BYTES, KnownPrefixes, Scope
from openinfer_server.text.marked_text import MarkedText

INLINE_CHARACTERS = 512  # shorter texts take less than a thread's round trip, about 0.3 ms
_CONTEXT_TOKENS = 4  # prompt tokens that a window detokenizer begins with


class ChatIds(NamedTuple):
    """A rendered chat as a prompt."""

    token_ids: tuple[int, ...]
    counts: tuple[int, ...]
    """How many tokens begin before each of the places that were asked for."""
    beginnings: tuple[NamedBeginning, ...] = ()


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        byte_table: bytes of each token if the vocabulary is byte-level, else None.
        encoding: the threads in which long texts are encoded.
        max_token_id: the largest id that it encodes to.
        table: these, or the bytes of SentencePiece's tokens; None for other decoders.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, num_token_ids: int) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special_ids = {
            token_id: added.content for token_id, added in tokenizer.get_added_tokens_decoder().items() if added.special
        }
        byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._pieces = SentencePieces.of(tokenizer.decoder)
        known = byte_level or self._pieces is not None
        self.table: ByteTable | None = build_byte_table(tokenizer, num_token_ids, self._pieces) if known else None
        self.byte_table: ByteTable | None = self.table if byte_level else None
        self.max_token_id = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.encoding = EncodingThreads()
        self._detokenizers: dict[frozenset[str], Callable[[Sequence[int]], Detokenizer]] = {}
        self._characters_per_token = _most_characters_per_token(tokenizer)

    @classmethod
    def load(cls, model_dir: Path, *, num_token_ids: int = 0) -> "Tokenizer":
        """Reads the tokenizer of a model folder.

        Raises:
            UnusableTokenizer: there is none, or not one that `tokenizers` reads.
        """
        try:
            content = read_tokenizer(model_dir)
        except (InvalidCheckpoint, BrokenPlugin) as error:
            raise UnusableTokenizer(str(error)) from error
        if content is None:
            raise UnusableTokenizer(
                f"{model_dir} has no {TOKENIZER_FILE}, and no installed package reads another format of it there"
            )
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # tokenizers raises bare Exception
            raise UnusableTokenizer(f"the tokenizer of {model_dir} cannot be read: {error}") from error
        return cls(tokenizer, num_token_ids=num_token_ids)

    def cover(self, num_token_ids: int, max_model_tokens: int) -> None:
        # the engine, which knows how many ids it may sample, was not there when this was loaded
        self.encoding.cover(max_model_tokens)
        if self.table is not None:
            self.table.cover(num_token_ids)

    def close(self) -> None:
        self.encoding.close()

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of a text, without encoding it; 0 where none is known."""
        return 0 if self._characters_per_token is None else len(text) // self._characters_per_token

    async def encode(self, text: str, *, add_special_tokens: bool, client: Client = THIS_PROCESS) -> list[int]:
        """Token ids of a text.

        Raises:
            ApiError: 413; the text is too long. 429 or 503; too much text of this client's owner, or of all, waits.
            ClientDisconnected: the client has left.
        """
        return await self._in_thread(client, text, lambda: self._encode(text, add_special_tokens=add_special_tokens))

    async def encode_chat(
        self,
        text: MarkedText,
        control_tokens: ControlTokens,
        *,
        client: Client = THIS_PROCESS,
        cache_salt: str | None = None,
        ends: Sequence[int] = (),
    ) -> ChatIds:
        """Token ids of a rendered chat, whose control tokens are the template's, and how many begin before each end.

        What the client's owner sent before under the same cache salt, of whose beginning the ids are known, is not
        encoded again.

        Raises:
            OriginLost: see there.
            ApiError, ClientDisconnected: see `encode`.
        """
        if len(text) <= INLINE_CHARACTERS:
            token_ids = control_tokens.encode(text)
            return ChatIds(tuple(token_ids), control_tokens.counts(text, token_ids, ends))
        scope = Scope(client.owner, cache_salt)

        def encode(begun: BegunEncoding) -> ChatIds:
            token_ids, beginnings = control_tokens.finish(begun)
            counts = control_tokens.counts(text, token_ids, ends, places=begun.places)
            return ChatIds(token_ids, counts, beginnings)

        return await self.encoding.run_rest(
            client, len(text), look_up=lambda: control_tokens.begin(text, scope), encode=encode
        )

    def control_tokens(
        self, *, own_texts: Iterable[str], markers: Iterable[str] = (), known_prefix_bytes: int = DEFAULT_BYTES
    ) -> ControlTokens:
        """The control tokens of chats; see there. `known_prefix_bytes` bound what is kept of the chats' beginnings."""
        known = KnownPrefixes(known_prefix_bytes)
        return ControlTokens(self._tokenizer, own_texts=own_texts, markers=markers, known_prefixes=known)

    async def _in_thread(self, client: Client, text: str, encode: Callable[[], list[int]]) -> list[int]:
        if len(text) <= INLINE_CHARACTERS:
            return encode()
        return await self.encoding.run(client, len(text), encode)

    def encode_short(self, text: str) -> list[int]:
        """Token ids of a few words, at once, without special tokens of the tokenizer's own."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode_prompt(self, token_ids: Sequence[int]) -> str:
        """Text of a prompt with its special tokens, as `echo` shows it."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def detokenizer(self, prompt_token_ids: Sequence[int], *, visible: frozenset[str] = frozenset()) -> Detokenizer:
        """A detokenizer for the completion of a prompt."""
        make = self._detokenizers.get(visible)
        if make is None:
            make = self._detokenizers[visible] = self._detokenizer_maker(visible)
        return make(prompt_token_ids)

    def _detokenizer_maker(self, visible: frozenset[str]) -> Callable[[Sequence[int]], Detokenizer]:
        # made once for each set of names; they are the parsers', of which a server has one pair
        shown = {token_id: name for token_id, name in self._special_ids.items() if name in visible}
        if self.table is not None:
            raw = self.table.raw
            if shown:
                raw = [shown[i].encode() if i in shown else data for i, data in enumerate(raw)]
            if self._pieces is not None and self._pieces.strips_first_space:
                # the decoder's beginning of a text is the completion's only after a prompt that shows nothing
                return lambda prompt: ByteDetokenizer(raw, strips_first_space=not any(raw[i] for i in prompt))
            return lambda _: ByteDetokenizer(raw)
        hidden = self._special_ids.keys() - shown.keys()

        def decode(token_ids: list[int]) -> str:
            seen = [token_id for token_id in token_ids if token_id not in hidden]
            return self._tokenizer.decode(seen, skip_special_tokens=False)

        return lambda context: WindowDetokenizer(decode, context[-_CONTEXT_TOKENS:])

    def token_id(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token by itself, special tokens by their name; for log-probabilities.

        No bytes for an id that the tokenizer lacks: models have more ids than that, so that their number divides well.
        """
        special = self._special_ids.get(token_id)
        if special is not None:
            return special.encode()
        if self.table is not None:
            return self.table.raw[token_id] if token_id < len(self.table.raw) else b""
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


def _most_characters_per_token(tokenizer: tokenizers.Tokenizer) -> int | None:
    """How many characters of a text one token can stand for, if there is a bound.

    A byte-level token stands for as many bytes as its name has characters, and NFC makes at most four characters out of
    two bytes or more (alpha with three marks becomes one character of three). Other normalisers, and added tokens
    that swallow the space around them, have no bound.
    """
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    if not isinstance(tokenizer.normalizer, normalizers.NFC | None):
        return None
    if any(added.lstrip or added.rstrip for added in tokenizer.get_added_tokens_decoder().values()):
        return None
    return 2 * max((len(token.encode()) for token in tokenizer.get_vocab(with_added_tokens=True)), default=1)
