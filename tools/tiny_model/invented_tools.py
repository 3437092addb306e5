"""Functions that nobody wrote: made of words that may not exist, so that names must be read from the schema."""

from collections.abc import Callable
from random import Random

from . import words
from .tool_shapes import Parameter, ToolKind, integer, number, one_of, string

_VERBS = (
    "open close start stop get find show print update create delete copy move check test count sort save load lock "
    "unlock paint clean repair sell rent order cancel confirm publish share add apply ask attach bake begin bend "
    "bind bless block boil borrow bring build burn call carry catch change choose climb collect compare cook cover "
    "cross cut describe draw drive drop dry empty enter explain export feed fetch fill fix fold follow freeze give "
    "grow guess hang heat hide hold import invite join keep kick label launch lift light list mark mend merge mix "
    "mount notify offer pack park pick pin plant play pour press pull push query read record reduce refresh "
    "register release remove replace report reset restart review ring roll rotate run scan send serve set shake "
    "ship sign skip spin split stack store submit swap sync tag take throw tie toggle touch trace train turn upload "
    "visit wash watch weigh wrap write"
).split()
HELD_OUT_VERBS = ["inspect", "rename", "archive", "measure", "polish"]
_KEYS = (
    "name id code owner label color size city level mode target price weight date note group status kind title user "
    "file path text email number value key type format language speed length width height depth angle start end "
    "limit offset page count amount category priority reason message source position room floor street country zip "
    "phone age unit"
).split()
_STYLES: tuple[Callable[[str, str], str], ...] = (
    lambda verb, noun: f"{verb}_{noun}",
    lambda verb, noun: f"{verb}_{noun}",
    lambda verb, noun: f"{verb}_the_{noun}",
    lambda verb, noun: f"{verb}{noun.capitalize()}",
    lambda verb, noun: f"{noun}-{verb}",
    lambda verb, noun: f"{verb}-{noun}",
    lambda verb, noun: f"{noun}-{verb}",
)
_REQUESTS = (
    "{verb} the {noun}",
    "{verb} a {noun}",
    "{verb} my {noun}",
    "please {verb} the {noun}",
    "can you {verb} a {noun}",
    "could you {verb} the {noun}",
    "I want you to {verb} the {noun}",
    "I need to {verb} the {noun}",
    "I would like to {verb} a {noun}",
    "it is time to {verb} the {noun}",
    "{noun}: {verb} it",
    "help me to {verb} this {noun}",
)
_DETAIL_STYLES = (
    (" with ", "{words} {{{key}}}", " and "),
    (" with ", "{words} {{{key}}}", ", "),
    (", ", "{words}: {{{key}}}", ", "),
    (" where ", "the {words} is {{{key}}}", " and "),
    (" (", "{words} = {{{key}}}", "; "),
    (" using ", "{{{key}}} as {words}", " and "),
    (". ", "Its {words} is {{{key}}}", ". "),
)


def invented_kind(rng: Random, *, held_out: bool = False, verb: str | None = None, noun: str | None = None) -> ToolKind:
    """Return a function nobody wrote: a verb, a noun and up to three parameters, half of them words that do not exist.

    `verb` and `noun` fix that part, for functions that differ in one word only.
    """
    verb = verb or _verb(rng, held_out=held_out)
    noun = noun or (words.invented_word(rng) if rng.random() < 0.5 else rng.choice(words.NOUNS))
    keys = {_key(rng) for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))} - {verb, noun}
    parameters = tuple(_invented_parameter(rng, key) for key in sorted(keys))
    requests = tuple(_invented_request(rng, verb, noun, parameters) for _ in range(2))
    descriptions = (
        f"{verb.capitalize()} a {noun}.",
        f"{verb.capitalize()} the {noun}",
        f"Use this to {verb} a {noun}.",
    )
    return ToolKind(f"{verb} {noun}", (rng.choice(_STYLES)(verb, noun),), descriptions, parameters, requests)


def _verb(rng: Random, *, held_out: bool) -> str:
    if held_out:
        return rng.choice(HELD_OUT_VERBS)
    return words.invented_word(rng) if rng.random() < 0.3 else rng.choice(_VERBS)


def _key(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.55:
        return rng.choice(_KEYS)
    if draw < 0.75:
        return words.invented_word(rng)
    return f"{rng.choice((rng.choice(words.NOUNS), words.invented_word(rng)))}_{rng.choice(_KEYS)}"


def _invented_request(rng: Random, verb: str, noun: str, parameters: tuple[Parameter, ...]) -> str:
    request = rng.choice(_REQUESTS).format(verb=verb, noun=noun)
    opening, detail, joiner = rng.choice(_DETAIL_STYLES)
    shown = list(parameters)
    rng.shuffle(shown)
    if shown:
        request += opening + joiner.join(
            detail.format(words=parameter.key.replace("_", " "), key=parameter.key) for parameter in shown
        )
    return request[0].upper() + request[1:] + (")." if shown and opening == " (" else ".")


def _invented_parameter(rng: Random, key: str) -> Parameter:
    if rng.random() < 0.35:
        return number(key, key, f"The {key.replace('_', ' ')}", integer(0, 999))
    draw = rng.choice((words.invented_word, words.code, words.city, words.person, one_of(words.ADJECTIVES)))
    return string(key, key, f"The {key.replace('_', ' ')}", draw)
