"""Short stories from a small grammar: someone wants a thing, meets trouble, is helped, and goes home."""

from random import Random

from . import words

_PLACES = (
    "village,forest,town by the sea,house on the hill,valley,castle,farm,city,cabin near the lake,garden,desert camp,"
    "harbour"
).split(",")
_ANIMALS = "dog cat horse rabbit mouse fox bear owl duck frog goat sheep turtle bee".split()
_TRAITS = "brave kind curious shy clever lazy cheerful patient hungry sleepy gentle noisy".split()
_WEATHERS = (
    "It was a sunny morning.,The rain fell all day.,Snow covered the ground.,A warm wind was blowing.,"
    "The fog was thick and grey.,The stars were bright that night."
).split(",")
_TROUBLES = (
    "but it was nowhere to be found",
    "but it had fallen into the river",
    "but the door was locked",
    "but the road was blocked by a fallen tree",
    "but a crow had carried it away",
    "but it was too heavy to lift",
    "but it was broken",
)
_HELP = (
    "Together they looked everywhere until they found it.",
    "They pulled and pushed until at last it worked.",
    '"Do not worry," said {friend}, "two are stronger than one."',
    "{friend} had a long rope, and that was all they needed.",
    "They sat down, thought for a while, and made a plan.",
    '"Follow me," said {friend}, "I know another way."',
)
_LESSONS = (
    "From that day on they were friends.",
    "They shared a cake and laughed about it all evening.",
    "{hero} never forgot how good it is to have help.",
    "And when the sun went down, everyone was happy.",
    "{hero} went home tired but glad.",
    "After that, {hero} always looked twice.",
)
_REQUESTS = (
    "Tell me a story about a {animal}.",
    "Tell me a short story about a {animal}.",
    "Can you tell a story about a {trait} {animal}?",
    "Write a short story about a {animal}.",
    "I would like to hear a story about a {animal}.",
)


def text(rng: Random) -> str:
    """Return a story of five to nine sentences."""
    return _story(rng, rng.choice(_ANIMALS), rng.choice(_TRAITS))


def request_and_story(rng: Random) -> tuple[str, str]:
    """Return a user's request for a story and a story that fits it."""
    animal, trait = rng.choice(_ANIMALS), rng.choice(_TRAITS)
    return rng.choice(_REQUESTS).format(animal=animal, trait=trait), _story(rng, animal, trait)


def _story(rng: Random, animal: str, trait: str) -> str:
    hero, friend = rng.sample(words.NAMES, 2)
    thing = f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}"
    names = {"hero": hero, "friend": friend}
    sentences = [
        f"Once upon a time there was a {trait} {animal} named {hero} who lived in a {rng.choice(_PLACES)}.",
        rng.choice(_WEATHERS),
        f"{hero} wanted to find the {thing}, {rng.choice(_TROUBLES)}.",
        f"Then {hero} met {friend}, a {rng.choice(_TRAITS)} {rng.choice(_ANIMALS)}.",
        f'"Can you help me?" asked {hero}.' if rng.random() < 0.7 else f"{friend} asked why {hero} looked so sad.",
        *(line.format(**names) for line in rng.sample(_HELP, rng.randint(1, 3))),
        rng.choice(_LESSONS).format(**names),
    ]
    if rng.random() < 0.4:
        sentences.append("The end.")
    return " ".join(sentences)
