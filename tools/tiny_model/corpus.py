"""Draw documents deterministically, and keep every 64th (by the hash of its text) out of training."""

import zlib
from collections.abc import Iterator
from random import Random

from . import chats, facts, stories, sums, tool_use
from .documents import END_OF_TEXT, Document, Kind

SHARES: dict[Kind, int] = {"facts": 38, "sums": 5, "stories": 4, "chats": 18, "tools": 35}
_HELD_OUT_ONE_IN = 64


def training_documents(seed: str, count: int) -> Iterator[Document]:
    """Yield `count` documents of the training side; the same seed yields the same documents."""
    rng = Random(seed)
    produced = 0
    while produced < count:
        document = draw(rng)
        if not is_held_out(document):
            produced += 1
            yield document


def held_out_documents(seed: str, count_per_kind: int) -> dict[Kind, list[Document]]:
    """Return documents of each kind that the split keeps away from training."""
    rng = Random(seed)
    found: dict[Kind, list[Document]] = {kind: [] for kind in SHARES}
    while any(len(documents) < count_per_kind for documents in found.values()):
        document = draw(rng)
        if is_held_out(document) and len(found[document.kind]) < count_per_kind:
            found[document.kind].append(document)
    return found


def is_held_out(document: Document) -> bool:
    """Say on which side of the split a document lies, from its text alone."""
    return zlib.crc32((document.context + document.target).encode()) % _HELD_OUT_ONE_IN == 0


def draw(rng: Random) -> Document:
    """Draw one document of any kind."""
    (kind,) = rng.choices(list(SHARES), weights=list(SHARES.values()))
    match kind:
        case "facts":
            return Document(kind, "", _fact_text(rng) + END_OF_TEXT)
        case "sums":
            return Document(kind, "", sums.text(rng) + END_OF_TEXT)
        case "stories":
            return Document(kind, "", stories.text(rng) + END_OF_TEXT)
        case "chats":
            return chats.document(rng)
        case "tools":
            return tool_use.document(rng)


def _fact_text(rng: Random) -> str:
    """Return one fact most of the time, else a page of facts about anything or about one kind of thing."""
    length = rng.choice((1, 1, 1, 1, 1, 1, 2, 4, 8, 16))
    if rng.random() < 0.5:
        relation = rng.choice(facts.RELATIONS)
        sentences = [_fact_sentence(rng, relation) for _ in range(length)]
    else:
        sentences = [_fact_sentence(rng, rng.choice(facts.RELATIONS)) for _ in range(length)]
    return rng.choice((" ", "\n")).join(sentences)


def _fact_sentence(rng: Random, relation: facts.Relation) -> str:
    subject = rng.choice(list(relation.answers))
    prompt = rng.choice(facts.prompts(relation, subject, held_out=False))
    if prompt.form == "question":
        return f"Question: {prompt.text}\nAnswer: {prompt.answer}."
    return f"{prompt.text} {prompt.answer}."
