"""Relations between a subject and an answer, each said in many wordings, some of which are held out.

A wording is text that the answer completes: `"The capital of {s} is"` for the subject France wants ` Paris`. A pair
(fact, wording) is held out by a hash of its names, so every held-out fact is still learnt from its other wordings.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from . import fact_tables as tables

HELD_OUT_PERCENT = 15


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact.

    `completions` and `questions` hold `{s}` (subject), `{S}` (capitalised), `{an}`/`{An}` (with its indefinite
    article). The first completion is never held out: it is the plain wording that everyone will try.
    `novel` is one more completion that no training text uses for any subject.
    """

    name: str
    topic: str
    answers: dict[str, str]
    completions: tuple[str, ...]
    questions: tuple[str, ...]
    novel: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A filled wording and the answer that must follow it."""

    relation: str
    subject: str
    text: str
    answer: str
    form: Literal["completion", "question"]


def capitalised(text: str) -> str:
    """Return `text` with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def with_article(noun: str) -> str:
    """Return `noun` behind `a` or `an`."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def fill(wording: str, subject: str) -> str:
    """Put `subject` into a wording's fields."""
    article = with_article(subject)
    return wording.format(s=subject, S=capitalised(subject), an=article, An=capitalised(article))


def is_held_out(relation: Relation, subject: str, wording: str) -> bool:
    """Say whether no training text may put this fact into this wording."""
    if wording == relation.completions[0]:
        return False
    name = f"{relation.name}/{subject}/{wording}".encode()
    return zlib.crc32(name) % 100 < HELD_OUT_PERCENT


def prompts(relation: Relation, subject: str, *, held_out: bool) -> list[Prompt]:
    """Return the fact's prompts in all wordings of one side of the split."""
    answer = relation.answers[subject]
    found: list[Prompt] = []
    for form, wordings in (("completion", relation.completions), ("question", relation.questions)):
        found += (
            Prompt(relation.name, subject, fill(wording, subject), answer, form)
            for wording in wordings
            if is_held_out(relation, subject, wording) is held_out
        )
    return found


def held_out_prompts() -> Iterator[Prompt]:
    """Yield every (fact, wording) pair that training never sees."""
    for relation in RELATIONS:
        for subject in relation.answers:
            yield from prompts(relation, subject, held_out=True)


def novel_prompts() -> Iterator[Prompt]:
    """Yield every fact in the one wording per relation that training uses for no subject at all."""
    for relation in RELATIONS:
        for subject, answer in relation.answers.items():
            yield Prompt(relation.name, subject, fill(relation.novel, subject), answer, "completion")


def _pairs(text: str) -> dict[str, str]:
    """Parse `subject answer; …`, the answer being the last word."""
    entries = (entry.strip() for entry in text.replace("\n", " ").split(";"))
    return dict(entry.rsplit(" ", 1) for entry in entries if entry)  # type: ignore[misc]


def _country_column(index: int) -> dict[str, str]:
    rows = [[cell.strip() for cell in line.split("|")] for line in tables.COUNTRIES.strip().splitlines()]
    return {row[0]: row[index] for row in rows if row[index] != "-"}


def _elements() -> list[tuple[str, str, str]]:
    entries = tables.ELEMENTS.replace("\n", " ").split(";")
    return [(name, symbol, number) for name, symbol, number in (entry.split() for entry in entries)]


def _following(names: list[str]) -> dict[str, str]:
    return {name: names[(index + 1) % len(names)] for index, name in enumerate(names)}


def _preceding(names: list[str]) -> dict[str, str]:
    return {name: names[index - 1] for index, name in enumerate(names)}


def _both_ways(pairs: dict[str, str]) -> dict[str, str]:
    return pairs | {answer: subject for subject, answer in pairs.items()}


_CAPITALS = _country_column(1)
_ELEMENTS = _elements()
_GROUP_OF = {animal: group for group, names in tables.ANIMAL_GROUPS.items() for animal in names.split()}

RELATIONS: tuple[Relation, ...] = (
    Relation(
        "capital",
        "the capital of {s}",
        _CAPITALS,
        (
            "The capital of {s} is",
            "The capital city of {s} is",
            "{S} has its capital in",
            "{S}'s capital is",
            "The city that is the capital of {s} is",
            "In {s}, the capital city is",
            "The government of {s} sits in its capital,",
            "On a map of {s}, the capital is marked as",
            "Country: {s}. Capital:",
            "If you visit the capital of {s}, you are in",
            "Everyone in {s} knows that the capital is",
        ),
        (
            "What is the capital of {s}?",
            "Which city is the capital of {s}?",
            "What's the capital city of {s}?",
            "Tell me the capital of {s}.",
            "Can you name the capital of {s}?",
            "Do you know the capital of {s}?",
            "{S}: what is its capital?",
        ),
        "The city that serves as the capital of {s} is",
    ),
    Relation(
        "country_of_capital",
        "the country whose capital is {s}",
        {capital: country for country, capital in _CAPITALS.items()},
        (
            "{s} is the capital of",
            "{s} is the capital city of",
            "The city of {s} is the capital of",
            "The country whose capital is {s} is",
            "Capital: {s}. Country:",
            "If you are in {s}, you are in the capital of",
            "{s} is where you find the government of",
        ),
        (
            "Which country has {s} as its capital?",
            "{s} is the capital of which country?",
            "What country is {s} the capital of?",
            "Of which country is {s} the capital?",
            "Tell me which country has the capital {s}.",
        ),
        "{s} serves as the capital of",
    ),
    Relation(
        "continent",
        "the continent of {s}",
        _country_column(2),
        (
            "{S} is in",
            "{S} is a country in",
            "{S} lies on the continent of",
            "The continent of {s} is",
            "Country: {s}. Continent:",
            "The country of {s} belongs to the continent of",
            "If you travel to {s}, you travel to",
            "On a globe, {s} is found in",
        ),
        (
            "Which continent is {s} in?",
            "On which continent is {s}?",
            "What continent does {s} belong to?",
            "Where in the world is {s}?",
            "Tell me the continent of {s}.",
        ),
        "Geographers place {s} in",
    ),
    Relation(
        "currency",
        "the currency of {s}",
        {country: f"the {money}" for country, money in _country_column(3).items()},
        (
            "The currency of {s} is",
            "The money used in {s} is",
            "In {s}, people pay with",
            "{S}'s currency is",
            "{S} uses a currency called",
            "Shops in {s} take",
            "Country: {s}. Currency:",
            "The official currency of {s} is",
        ),
        (
            "What is the currency of {s}?",
            "Which currency is used in {s}?",
            "What money do people use in {s}?",
            "How do people pay in {s}?",
            "Tell me the currency of {s}.",
        ),
        "Banknotes in {s} are in",
    ),
    Relation(
        "language",
        "the main language of {s}",
        _country_column(4),
        (
            "The official language of {s} is",
            "People in {s} speak",
            "In {s}, most people speak",
            "The main language of {s} is",
            "The language spoken in {s} is",
            "Children in {s} learn to read in",
            "Country: {s}. Language:",
            "Newspapers in {s} are written in",
        ),
        (
            "What language do people speak in {s}?",
            "Which language is spoken in {s}?",
            "What is the official language of {s}?",
            "What is the main language of {s}?",
            "Tell me the language of {s}.",
        ),
        "On the streets of {s} you mostly hear",
    ),
    Relation(
        "element_symbol",
        "the chemical symbol for {s}",
        {name: symbol for name, symbol, _ in _ELEMENTS},
        (
            "The chemical symbol for {s} is",
            "The symbol of {s} is",
            "In chemistry, {s} is written as",
            "Chemists write {s} as",
            "Element: {s}. Symbol:",
            "{S} has the chemical symbol",
            "In the periodic table, {s} has the symbol",
            "The element {s} is abbreviated as",
        ),
        (
            "What is the chemical symbol for {s}?",
            "What is the symbol of {s}?",
            "How do chemists write {s}?",
            "Which symbol does the element {s} have?",
            "Tell me the chemical symbol of {s}.",
        ),
        "The letters that stand for {s} are",
    ),
    Relation(
        "element_of_symbol",
        "the element with the symbol {s}",
        {symbol: name for name, symbol, _ in _ELEMENTS},
        (
            "The chemical symbol {s} stands for",
            "The symbol {s} stands for",
            "In chemistry, {s} means",
            "{s} is the chemical symbol of",
            "Symbol: {s}. Element:",
            "The element with the symbol {s} is",
            "In the periodic table, the symbol {s} belongs to",
        ),
        (
            "Which element has the symbol {s}?",
            "What does the chemical symbol {s} stand for?",
            "What element is {s}?",
            "{s} is the symbol of which element?",
        ),
        "Chemists who write {s} are talking about",
    ),
    Relation(
        "atomic_number",
        "the atomic number of {s}",
        {name: number for name, _, number in _ELEMENTS},
        (
            "The atomic number of {s} is",
            "{S} has the atomic number",
            "The element {s} has atomic number",
            "In the periodic table, {s} is number",
            "Element: {s}. Atomic number:",
            "The number of protons in an atom of {s} is",
            "{S}'s atomic number is",
        ),
        (
            "What is the atomic number of {s}?",
            "Which atomic number does {s} have?",
            "What number is {s} in the periodic table?",
            "How many protons are in an atom of {s}?",
            "Tell me the atomic number of {s}.",
        ),
        "The count of protons that makes an atom {s} is",
    ),
    Relation(
        "animal_group",
        "the kind of animal {an} is",
        {animal: with_article(group) for animal, group in _GROUP_OF.items()},
        (
            "{An} is",
            "The kind of animal that {an} is:",
            "In biology, {an} is",
            "Every child knows that {an} is",
            "Animal: {s}. It is",
            "Among the animals, {an} is",
            "A scientist would say that {an} is",
            "Zoologists classify {an} as",
        ),
        (
            "What kind of animal is {an}?",
            "Which group of animals does {an} belong to?",
            "Is {an} a mammal, a bird, a fish, a reptile, an amphibian or an insect?",
            "What sort of animal is {an}?",
            "How do zoologists classify {an}?",
        ),
        "In a book of animals, {an} is listed as",
    ),
    Relation(
        "young",
        "the name for a young {s}",
        {animal: with_article(young) for animal, young in tables.YOUNG.items()},
        (
            "A young {s} is called",
            "A baby {s} is called",
            "The young of {an} is called",
            "The name for a young {s} is",
            "When {an} is very young, it is called",
            "{An} starts its life as",
            "The child of {an} is",
            "A newborn {s} is known as",
        ),
        (
            "What is a young {s} called?",
            "What is a baby {s} called?",
            "What do you call a young {s}?",
            "What is the young of {an} called?",
            "What is the name for a baby {s}?",
        ),
        "Before it is grown up, {an} is named",
    ),
    Relation(
        "sound",
        "the sound {an} makes",
        tables.SOUNDS,
        (
            "To make itself heard, {an}",
            "When it makes a noise, {an}",
            "On the farm or in the wild, {an}",
            "The sound is clear: {an}",
            "Listen! {An}",
            "When it is excited, {an}",
            "Children learn that {an}",
            "Every morning {an}",
        ),
        (
            "What sound does {an} make?",
            "What noise does {an} make?",
            "How does {an} sound?",
            "What do you say of the noise of {an}?",
        ),
        "As everyone has heard, {an}",
    ),
    Relation(
        "opposite",
        "the opposite of {s}",
        _both_ways(_pairs(tables.OPPOSITES)),
        (
            "The opposite of {s} is",
            "The opposite of the word {s} is",
            "If something is not {s}, it may be",
            "The word {s} is the opposite of",
            "Word: {s}. Opposite:",
            "The contrary of {s} is",
            "{S} and its opposite,",
            "{S} is the reverse of",
        ),
        (
            "What is the opposite of {s}?",
            "Which word is the opposite of {s}?",
            "What is the contrary of {s}?",
            "Tell me the opposite of {s}.",
            "What word means the reverse of {s}?",
        ),
        "The antonym of {s} is",
    ),
    Relation(
        "plural",
        "the plural of {s}",
        _pairs(tables.PLURALS),
        (
            "The plural of {s} is",
            "The plural form of {s} is",
            "One {s}, two",
            "Word: {s}. Plural:",
            "Many of {an} are called",
            "If there is more than one {s}, we write",
            "In the plural, {s} becomes",
        ),
        (
            "What is the plural of {s}?",
            "What is the plural form of {s}?",
            "How do you write the plural of {s}?",
            "What is more than one {s} called?",
            "Tell me the plural of {s}.",
        ),
        "When we count several of them, {s} turns into",
    ),
    Relation(
        "past_tense",
        "the past tense of {s}",
        _pairs(tables.PAST_TENSES),
        (
            "The past tense of {s} is",
            "The past tense of the verb {s} is",
            "Today I {s}, yesterday I",
            "Verb: {s}. Past tense:",
            "In the past tense, {s} becomes",
            "Every day they {s}; last week they",
            "The simple past of {s} is",
        ),
        (
            "What is the past tense of {s}?",
            "What is the simple past of {s}?",
            "How do you say {s} in the past tense?",
            "Which word is the past tense of {s}?",
            "Tell me the past tense of {s}.",
        ),
        "Talking about yesterday, {s} changes to",
    ),
    Relation(
        "thing_colour",
        "the colour of {s}",
        _pairs(tables.THING_COLOURS),
        (
            "The colour of {s} is",
            "{S} has the colour",
            "If you look at {s}, you see the colour",
            "To paint {s}, take the colour",
            "Thing: {s}. Colour:",
            "The usual colour of {s} is",
            "Everyone can see that the colour of {s} is",
        ),
        (
            "What colour is {s}?",
            "Which colour does {s} have?",
            "What is the colour of {s}?",
            "Tell me the colour of {s}.",
        ),
        "A picture of {s} needs a lot of",
    ),
    Relation(
        "colour_mix",
        "the mixture of {s}",
        tables.COLOUR_MIXES,
        (
            "Mixing {s} gives",
            "If you mix {s}, you get",
            "When you mix {s}, the result is",
            "{S} together make",
            "A mixture of {s} is",
            "Painters mix {s} to get",
        ),
        (
            "What do you get if you mix {s}?",
            "Which colour do {s} make?",
            "What colour is a mixture of {s}?",
            "What is {s} mixed together?",
        ),
        "Stirring {s} paint into one pot turns it",
    ),
    Relation(
        "next_day",
        "the day after {s}",
        _following(tables.DAYS),
        (
            "The day after {s} is",
            "After {s} comes",
            "{s} is followed by",
            "If today is {s}, tomorrow is",
            "The next day after {s} is",
            "When {s} is over, it is",
        ),
        (
            "Which day comes after {s}?",
            "What day is after {s}?",
            "If today is {s}, what day is tomorrow?",
            "What is the day after {s}?",
        ),
        "One sleep after {s} it is",
    ),
    Relation(
        "previous_day",
        "the day before {s}",
        _preceding(tables.DAYS),
        (
            "The day before {s} is",
            "Before {s} comes",
            "{s} is the day after",
            "If today is {s}, yesterday was",
            "The day just before {s} is",
        ),
        (
            "Which day comes before {s}?",
            "What day is before {s}?",
            "If today is {s}, what day was yesterday?",
            "What is the day before {s}?",
        ),
        "One sleep before {s} it was",
    ),
    Relation(
        "next_month",
        "the month after {s}",
        _following(tables.MONTHS),
        (
            "The month after {s} is",
            "After the month of {s} comes",
            "The month of {s} is followed by",
            "If this month is {s}, next month is",
            "When {s} ends, the new month is",
        ),
        (
            "Which month comes after {s}?",
            "What month follows {s}?",
            "If this month is {s}, what is next month?",
            "What is the month after {s}?",
        ),
        "Turn the calendar page of {s} and you see",
    ),
    Relation(
        "month_place",
        "the place of {s} in the year",
        dict(zip(tables.MONTHS, (f"{ordinal} month" for ordinal in tables.ORDINALS), strict=True)),
        (
            "{s} is the",
            "In the calendar, {s} is the",
            "Of the twelve months, {s} is the",
            "In every year, {s} is the",
            "Counting from January, {s} is the",
        ),
        (
            "Which month of the year is {s}?",
            "Where in the year is {s}?",
            "What place does {s} have in the calendar?",
        ),
        "Ask a calendar and it says that {s} is the",
    ),
    Relation(
        "planet_place",
        "the place of {s} among the planets",
        dict(zip(tables.PLANETS, (f"{ordinal} planet" for ordinal in tables.ORDINALS), strict=False)),
        (
            "Counted from the Sun, {s} is the",
            "In the solar system, {s} is the",
            "From the Sun outwards, {s} is the",
            "Astronomers know {s} as the",
            "Of the eight planets, {s} is the",
        ),
        (
            "Which planet from the Sun is {s}?",
            "What place does {s} have among the planets?",
            "How far out is {s} among the planets?",
        ),
        "Flying away from the Sun, you meet {s} as the",
    ),
    Relation(
        "sides",
        "the number of sides of {an}",
        tables.SHAPES,
        (
            "The number of sides of {an} is",
            "Counting the sides of {an} gives",
            "If you draw {an}, the number of its sides is",
            "Shape: {s}. Number of sides:",
            "The number of corners of {an} is",
            "For {an}, the number of sides is",
        ),
        (
            "How many sides does {an} have?",
            "How many corners does {an} have?",
            "What is the number of sides of {an}?",
            "Count the sides of {an}.",
        ),
        "Walk around {an} and the number of edges you pass is",
    ),
    Relation(
        "number_word",
        "the word for the number {s}",
        {str(number): word for number, word in enumerate(tables.NUMBER_WORDS)},
        (
            "The number {s} is written as",
            "The number {s} in words is",
            "In words, {s} is",
            "Number: {s}. Word:",
            "We spell the number {s} as",
            "The English word for {s} is",
        ),
        (
            "How do you write {s} in words?",
            "What is the word for the number {s}?",
            "How do you spell the number {s}?",
            "What is {s} in words?",
        ),
        "On a cheque, {s} would be spelt out as",
    ),
    Relation(
        "roman",
        "the Roman numeral for {s}",
        {str(number): numeral for number, numeral in enumerate(tables.ROMAN, start=1)},
        (
            "The Roman numeral for {s} is",
            "In Roman numerals, {s} is",
            "The Romans wrote {s} as",
            "The number {s} as a Roman numeral is",
            "Number: {s}. Roman numeral:",
            "An old Roman stone shows {s} as",
        ),
        (
            "What is the Roman numeral for {s}?",
            "How did the Romans write {s}?",
            "What is {s} in Roman numerals?",
            "Write {s} as a Roman numeral.",
        ),
        "On a clock with Roman numerals, {s} would be",
    ),
    Relation(
        "author",
        "the author of {s}",
        tables.AUTHORS,
        (
            "{s} was written by",
            "The author of {s} is",
            "The writer of {s} is",
            "The book {s} was written by",
            "Title: {s}. Author:",
            "{s} is a famous work by",
            "We owe the work {s} to",
        ),
        (
            "Who wrote {s}?",
            "Who is the author of {s}?",
            "By whom was {s} written?",
            "Tell me the author of {s}.",
            "Which author wrote {s}?",
        ),
        "The pen behind {s} belonged to",
    ),
    Relation(
        "landmark",
        "the city of {s}",
        tables.LANDMARKS,
        (
            "{S} is in the city of",
            "{S} stands in",
            "To see {s}, you travel to",
            "The city where you find {s} is",
            "Sight: {s}. City:",
            "Tourists visit {s} in",
            "{S} is a famous sight in",
        ),
        (
            "In which city is {s}?",
            "Where is {s}?",
            "Which city do you visit to see {s}?",
            "Where can I see {s}?",
        ),
        "Postcards of {s} are sold in",
    ),
    Relation(
        "job",
        "the name for someone who {s}",
        {task: with_article(job) for task, job in tables.JOBS.items()},
        (
            "A person who {s} is",
            "Someone who {s} is called",
            "If somebody {s}, that person is",
            "The name for someone who {s} is",
            "Anyone who {s} for a living is",
            "My aunt {s}. She is",
        ),
        (
            "What is a person who {s} called?",
            "What do you call someone who {s}?",
            "What is the job of a person who {s}?",
            "Who {s}?",
        ),
        "The trade of a person who {s} is that of",
    ),
)
