"""`ControlTokens`: encodes a rendered chat so that control tokens come from the template alone.

Control tokens are the added tokens that are marked special, and those with a character that is no space which the
template or a parser writes (Qwen3's `<tool_call>` and DeepSeek-V3's role marks are not special). In a second tokenizer,
which shares the first one's model, each has a random name of 128 bits. A rendered chat is encoded there as one text,
in which the template's control tokens have been replaced by these names: they are found where the first tokenizer would
find them, with its rules for spaces and neighbours, and nothing else that looks like one of them is. So nothing is cut,
and without control text in what a client wrote the ids are those of the whole text.

Within a turn of the assistant the control tokens that are not special count, too.

Of a text whose beginning is known (`known_prefixes.py`) only what follows is encoded, where that comes to the same ids.
"""

import json
import re
import secrets
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from openinfer_core.request import NamedBeginning
from openinfer_server.text.known_prefixes import Cut, KnownPrefix, KnownPrefixes, Scope, SeenText
from openinfer_server.text.marked_text import MarkedText, Origin
from openinfer_server.text.segments import separates, works_piecewise
from openinfer_server.text.token_counts import decodes_to_text, num_before_tail, place_of_nth

UNWANTED = -1
_LOST = re.compile(bytes((Origin.LOST,)) + b"+")


class OriginLost(Exception):
    """A control token stands where the template lost its texts' origins; the message is for the client."""


class _Place(NamedTuple):
    """A control token in a text, by its own name there."""

    begin: int
    end: int
    token_id: int


@dataclass(frozen=True, slots=True)
class BegunEncoding:
    """A chat whose control tokens are found, and as much of whose ids as is known; `ControlTokens.finish` goes on."""

    text: MarkedText
    places: Sequence[_Place]
    known: KnownPrefix
    scope: Scope
    encoder: "_Encoder"

    @property
    def new_characters(self) -> int:
        """That are still to be encoded."""
        return len(self.text) - self.known.end


class EncodedChat(NamedTuple):
    """Token ids of a rendered chat."""

    token_ids: tuple[int, ...]
    beginnings: tuple[NamedBeginning, ...]
    """What the ids begin with, by name."""


class ControlTokens:
    """The control tokens of one model.

    Attributes:
        token_ids: of all of them.
        cut_ids: those before which a text may be cut (`segments.py`); none if its tokenizer's parts are not known.
        known_prefixes: what `begin` looks in.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        own_texts: Iterable[str],
        markers: Iterable[str],
        known_prefixes: KnownPrefixes | None = None,
    ) -> None:
        """Shares the tokenizer's model.

        Args:
            tokenizer: of the model; not changed.
            own_texts: what the template writes itself.
            markers: what parsers look for in the model's output.
            known_prefixes: where beginnings of texts are kept; by default a store of its own.
        """
        self.known_prefixes = KnownPrefixes() if known_prefixes is None else known_prefixes
        added = tokenizer.get_added_tokens_decoder()
        written = "\0".join((*own_texts, *markers))
        control = {
            token_id: each
            for token_id, each in added.items()
            if each.special or (each.content.strip() and each.content in written)
        }
        self.token_ids = frozenset(control)
        cuts = (i for i, each in control.items() if separates(each) and not each.content[:1].isspace())
        is_known = works_piecewise(tokenizer)
        self.cut_ids = frozenset(cuts if is_known else ())
        self._tells_tails = is_known and decodes_to_text(tokenizer)
        self._names = _Names({token_id: each.content for token_id, each in control.items()})
        self._any = _pattern(each.content for each in control.values())
        self._longest = max((len(each.content) for each in control.values()), default=0)
        self._longest_added = max((len(each.content) for each in added.values()), default=0)
        self._patterns = {
            Origin.TEMPLATE: _Patterns.of(added.values()),
            Origin.ASSISTANT: _Patterns.of(each for each in added.values() if not each.special),
        }
        self._ids = {each.content: token_id for token_id, each in control.items()}
        self._tokenizer = tokenizer
        self._encoder = _Encoder(tokenizer, tokenizer.model, self._names, generation=0)
        self._copying = threading.Lock()

    def encode(self, text: MarkedText) -> list[int]:
        """Token ids of a rendered chat, encoded as a whole.

        Raises:
            OriginLost: see there.
        """
        self._check_lost(text)
        ids, _, encoder = self._encode_rest(self._encoder, text, 0, list(self._find(text)))
        return encoder.restored(ids)

    def begin(self, text: MarkedText, scope: Scope) -> BegunEncoding:
        """Looks for the longest known beginning of a rendered chat; quick next to encoding it.

        Raises:
            OriginLost: see there.
        """
        self._check_lost(text)
        encoder, following = self._encoder, self._find(text)
        places: list[_Place] = []
        seen: SeenText | None = None
        for place in following:
            places.append(place)
            if place.token_id in self.cut_ids and self.known_prefixes.is_first(_cut(place)):
                seen = self.known_prefixes.seen(scope, encoder.generation, text, _cut(place))
                break
        if seen is None:
            places.extend(following)
        else:
            places = [*seen.places, *self._find(text, seen.end)]
        cuts = (_cut(place) for place in places if place.token_id in self.cut_ids)
        known = self.known_prefixes.find(scope, encoder.generation, text, cuts, seen)
        return BegunEncoding(text, places, known, scope, encoder)

    def finish(self, begun: BegunEncoding) -> EncodedChat:
        """Token ids of the chat, those of `encode`; what is new of it is known from now on. Once for each `begin`."""
        text, known = begun.text, begun.known
        rest = [place for place in begun.places if place.begin >= known.end]
        ids, found, encoder = self._encode_rest(begun.encoder, text, known.end, rest)
        if encoder is not begun.encoder:
            # Another model went on, which may have other ids for what the first one encoded.
            if known.end:
                ids, found, encoder = self._encode_rest(encoder, text, 0, begun.places)
            known = self.known_prefixes.nothing(begun.scope, encoder.generation)
        restored, beginnings = encoder.restored(ids), known.beginnings
        if self.known_prefixes.is_on and self.cut_ids:
            restored = self.known_prefixes.shared(restored)
            pairs = zip(found, encoder.control_indices(ids), strict=True)
            cuts = [(_cut(place), index) for place, index in pairs if place.token_id in self.cut_ids]
            beginnings = self.known_prefixes.keep(
                begun.scope, known, text, cuts, restored, places=begun.places, num_after=self._longest_added
            )
        return EncodedChat(known.followed_by(restored), beginnings)

    def counts(
        self,
        text: MarkedText,
        token_ids: Sequence[int],
        ends: Sequence[int],
        *,
        places: "Sequence[_Place] | None" = None,
    ) -> tuple[int, ...]:
        """How many tokens begin before each of some places in a rendered chat.

        Args:
            text: the chat.
            token_ids: of it, by `encode` or `finish`.
            ends: the places, in characters.
            places: of `begin`, where it was called.
        """
        if not ends:
            return ()
        found = list(self._find(text)) if places is None else places
        return tuple(self._count(text, token_ids, found, end) for end in ends)

    def _count(self, text: MarkedText, token_ids: Sequence[int], places: Sequence[_Place], end: int) -> int:
        if self.cut_ids != self.token_ids:  # rules for neighbours may hide some of the places
            _, places, _ = self._encode_rest(self._encoder, text, 0, places)
            return self._count_in(text, (0, len(text)), places, end)
        number = bisect_left(places, end, key=lambda place: place.begin)  # of places that begin before the end
        begin, first, after = 0, 0, 0
        if number:
            begin, after, _ = places[number - 1]
            first = place_of_nth(token_ids, self.token_ids, number - 1, len(places))
        if end <= after:
            return first + min(number, 1)
        last = place_of_nth(token_ids, self.token_ids, number, len(places))
        following = places[number].begin if number < len(places) else len(text)
        if end == following:
            return last
        tail = text.plain[end:following]
        if self._tells_tails and (count := num_before_tail(self._tokenizer, token_ids, last, tail)) is not None:
            return count
        return first + self._count_in(text, (begin, following), places[number - 1 : number] if number else (), end)

    def _count_in(self, text: MarkedText, part: tuple[int, int], places: Sequence[_Place], end: int) -> int:
        """How many tokens of a part of the text, which is encoded again, begin before a place in it."""
        begin, following = part
        written, named = self._written(text[:following], begin, places)
        shift = -begin
        for place, name in zip(places, named, strict=True):
            if place.begin < end:
                shift, end = (name.end - place.end), max(end, place.end)
        return self._encoder.count(written, end + shift)

    def _encode_rest(
        self, encoder: "_Encoder", text: MarkedText, begin: int, places: Sequence[_Place]
    ) -> tuple[list[int], Sequence[_Place], "_Encoder"]:
        """An encoder's ids from a place in the text on, the control tokens that are found, and who encoded."""
        while True:
            written, named = self._written(text, begin, places)
            ids = encoder.encode(written)
            control_ids = encoder.control_ids(ids)
            if control_ids == [place.token_id for place in places]:
                return ids, places, encoder
            if UNWANTED in control_ids:
                self._copy_model(encoder)
                encoder = self._encoder
                if begin:
                    return [], [], encoder  # what comes before has to be encoded anew, too
            else:
                places = _found_places(places, named, encoder.found(written))

    def _find(self, text: MarkedText, first: int = 0) -> Iterator[_Place]:
        """The control tokens all of whose characters are the template's, or an assistant's that may write them.

        From a cut on (`first`) they are those that are found there in the whole text, whose token begins at the cut: it
        is looked for before all that is normalised, and nothing is found across where it begins.
        """
        plain = text.plain
        for begin, end, origin in text.runs(first):
            patterns = self._patterns.get(origin)
            for found in () if patterns is None else patterns.find(plain, begin, end):
                token_id = self._ids.get(found.group())
                if token_id is not None:
                    yield _Place(found.start(), found.end(), token_id)

    def _written(self, text: MarkedText, begin: int, places: Sequence[_Place]) -> tuple[str, list[_Place]]:
        """The text from a place on with the names of its control tokens, and where these are in it."""
        plain = text.plain
        parts: list[str] = []
        named: list[_Place] = []
        end, shift = begin, -begin
        for place in places:
            name = self._names[place.token_id]
            parts += (plain[end : place.begin], name)
            named.append(_Place(place.begin + shift, place.begin + shift + len(name), place.token_id))
            shift += len(name) - (place.end - place.begin)
            end = place.end
        return "".join((*parts, plain[end:])), named

    def _copy_model(self, used: "_Encoder") -> None:
        """Goes on with a model that knows no control tokens: the first one makes them of other text, as words."""
        with self._copying:
            if self._encoder is used:
                model = _renamed_model(self._tokenizer, self._names)
                self._encoder = _Encoder(self._tokenizer, model, self._names, generation=used.generation + 1)

    def _check_lost(self, text: MarkedText) -> None:
        """Refuses control text that has characters of lost origin."""
        if self._any is None or Origin.LOST not in text.origins:
            return
        plain = text.plain
        for lost in _LOST.finditer(text.origins):
            begin, last = max(0, lost.start() - self._longest + 1), lost.end() + self._longest - 1
            while (found := self._any.search(plain, begin, last)) is not None and found.start() < lost.end():
                if found.end() > lost.start():
                    message = "the chat template changes texts in a way that hides who wrote them, and they have"
                    raise OriginLost(f"{message} {found.group()!r}, which only the template may write")
                begin = found.start() + 1


class _Names(dict[int, str]):
    """Names of control tokens that no client can guess, by token id.

    A name begins and ends as its token does, since rules for neighbouring spaces and words look at these characters.
    """

    def __init__(self, contents: Mapping[int, str]) -> None:
        secret = secrets.token_hex(16)
        super().__init__((i, f"{text[0]}{secret}.{i}.{text[-1]}") for i, text in contents.items())
        self.of_content = {text: self[token_id] for token_id, text in contents.items()}


@dataclass(frozen=True, slots=True)
class _Patterns:
    """What a tokenizer looks for in a text, in its order: tokens as they stand, then what it looks for in the rest."""

    patterns: Sequence[re.Pattern[str]]

    @classmethod
    def of(cls, tokens: Iterable[AddedToken]) -> "_Patterns":
        several = list(tokens)
        both = (_pattern(each.content for each in several if each.normalized is kind) for kind in (False, True))
        return cls([pattern for pattern in both if pattern is not None])

    def find(self, text: str, begin: int, end: int, first: int = 0) -> Iterator[re.Match[str]]:
        """The tokens between two places, in order."""
        if first == len(self.patterns):
            return
        for found in self.patterns[first].finditer(text, begin, end):
            yield from self.find(text, begin, found.start(), first + 1)
            yield found
            begin = found.end()
        yield from self.find(text, begin, end, first + 1)


class _Encoder:
    """A tokenizer that knows control tokens by their names alone.

    Attributes:
        generation: its number; encoders of one generation have one model.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, model: Any, names: _Names, *, generation: int) -> None:
        self.generation = generation
        self._tokenizer = tokenizers.Tokenizer(model)
        if tokenizer.normalizer is not None:
            self._tokenizer.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            self._tokenizer.pre_tokenizer = tokenizer.pre_tokenizer
        added = tokenizer.get_added_tokens_decoder()
        # Tokens get ids as they come, after the model's own: first those that have got theirs in the same way.
        known = tokenizer.model
        order = sorted(added, key=lambda token_id: (known.id_to_token(token_id) is not None, token_id))
        named = [_named(added[token_id], names.get(token_id)) for token_id in order]
        self._tokenizer.add_tokens(named)  # pyright: ignore[reportUnknownMemberType]
        ours = {each.content: token_id for token_id, each in self._tokenizer.get_added_tokens_decoder().items()}
        ids = {ours[names.get(token_id, each.content)]: token_id for token_id, each in added.items()}
        self._restored = {our_id: token_id for our_id, token_id in ids.items() if our_id != token_id}
        words = [model.token_to_id(text) for text in names.of_content]
        made = {token_id: UNWANTED for token_id in words if token_id is not None}
        self._control = made | {ours[name]: token_id for token_id, name in names.items()}

    def encode(self, text: str) -> list[int]:
        """Ids of this tokenizer."""
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def count(self, text: str, end: int) -> int:
        """How many tokens begin before a place in a text."""
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        return sum(begin < end for begin, _ in encoding.offsets)

    def control_ids(self, ids: Sequence[int]) -> list[int]:
        """The control tokens among ids, as the first tokenizer's; `UNWANTED` for one that the model made of text."""
        control = self._control
        return [control[token_id] for token_id in ids if token_id in control]

    def control_indices(self, ids: Sequence[int]) -> list[int]:
        """Where among ids those of `control_ids` are."""
        control = self._control
        return [index for index, token_id in enumerate(ids) if token_id in control]

    def restored(self, ids: list[int]) -> list[int]:
        """The first tokenizer's ids."""
        restored = self._restored
        return [restored.get(token_id, token_id) for token_id in ids] if restored else ids

    def found(self, text: str) -> list[_Place]:
        """Where control tokens are found."""
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]  # `encode` keeps the interpreter
        return [
            _Place(*offsets, self._control[token_id])
            for token_id, offsets in zip(encoding.ids, encoding.offsets, strict=True)
            if token_id in self._control
        ]


def _cut(place: _Place) -> Cut:
    return Cut(place.begin, place.token_id)


def _found_places(places: Sequence[_Place], named: list[_Place], found: Sequence[_Place]) -> list[_Place]:
    """The places whose names are found.

    Rules for neighbours and normalisation keep a tokenizer from finding others, as they would in the whole text: there
    the token is the text that it is.
    """
    kept = [place for place, name in zip(places, named, strict=True) if _is_found(name, found)]
    if len(kept) == len(places):
        raise RuntimeError("control tokens are found that are not in the text")
    return kept


def _named(token: AddedToken, name: str | None) -> AddedToken:
    return AddedToken(
        token.content if name is None else name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
    )


def _renamed_model(tokenizer: tokenizers.Tokenizer, names: _Names) -> Any:
    """A copy of a tokenizer's model that knows its control tokens by their names alone."""
    content = json.loads(tokenizer.to_str())
    model, of_content = content["model"], names.of_content
    if isinstance(model["vocab"], dict):
        model["vocab"] = {of_content.get(text, text): token_id for text, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[of_content.get(text, text), score] for text, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes_any(merge, of_content)]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = of_content.get(model["unk_token"], model["unk_token"])
    content |= {"added_tokens": [], "post_processor": None}
    return tokenizers.Tokenizer.from_str(json.dumps(content)).model


def _makes_any(merge: str | Sequence[str], texts: Mapping[str, str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return not texts.keys().isdisjoint((left, right, left + right))


def _pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    """The longest of several texts at the first place that has one, as tokenizers look for added tokens."""
    several = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, several))) if several else None


def _is_found(place: _Place, found: Iterable[_Place]) -> bool:
    # a token may take the white space next to it along
    return any(
        each.token_id == place.token_id and each.begin <= place.begin and place.end <= each.end for each in found
    )
