"""`allowed_token_ids` and `bad_words` as the engine takes them: token ids, checked and bounded."""

from dataclasses import dataclass

from openinfer_core.sampling import MAX_ALLOWED_TOKEN_IDS
from openinfer_server.http.api_errors import invalid
from openinfer_server.request.fields import MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORDS
from openinfer_server.request.generation_fields import SamplingFields
from openinfer_server.service import Service
from openinfer_server.text.tokenizer import Tokenizer

MAX_IDS_OF_CHOICES = 4 * MAX_ALLOWED_TOKEN_IDS  # over all choices: each is told all of them


@dataclass(frozen=True, slots=True)
class Restrictions:
    """What may be sampled."""

    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


def read_restrictions(service: Service, fields: SamplingFields, *, num_choices: int) -> Restrictions:
    """Raises `ApiError`: 400; a word or an id is none, or there are too many."""
    allowed, words = _allowed(fields, service.info.num_token_ids), _bad_words(service.tokenizer, fields)
    num_ids = num_choices * (len(allowed or ()) + sum(map(len, words)))
    if num_ids > MAX_IDS_OF_CHOICES:
        field = "bad_words" if allowed is None else "allowed_token_ids"
        message = f"{num_ids} token ids of allowed_token_ids and bad_words, over all choices, exceed "
        raise invalid(field, f"{message}{MAX_IDS_OF_CHOICES}")
    return Restrictions(allowed, words)


def _allowed(fields: SamplingFields, num_token_ids: int) -> tuple[int, ...] | None:
    given = fields.allowed_token_ids
    if given is None:
        return None
    if not 1 <= len(given) <= MAX_ALLOWED_TOKEN_IDS:
        message = f"allowed_token_ids has {len(given)} entries; 1 to {MAX_ALLOWED_TOKEN_IDS} are possible"
        raise invalid("allowed_token_ids", message)
    if min(given) < 0 or max(given) >= num_token_ids:
        raise invalid("allowed_token_ids", f"an allowed token id is outside 0 .. {num_token_ids - 1}")
    return tuple(given)


def _bad_words(tokenizer: Tokenizer, fields: SamplingFields) -> tuple[tuple[int, ...], ...]:
    """Tokens of each word at the beginning of a text, and after a space."""
    given = fields.bad_words or []
    if len(given) > MAX_BAD_WORDS:
        raise invalid("bad_words", f"bad_words has {len(given)} words; at most {MAX_BAD_WORDS} are possible")
    words: dict[tuple[int, ...], None] = {}
    for word in given:
        stripped = word.lstrip()
        if not stripped or len(word) > MAX_BAD_WORD_CHARACTERS:
            raise invalid(
                "bad_words", f"a bad word has 1 to {MAX_BAD_WORD_CHARACTERS} characters, not all of them white space"
            )
        words |= dict.fromkeys(tuple(tokenizer.encode_short(text)) for text in (stripped, f" {stripped}"))
    return tuple(word for word in words if word)
