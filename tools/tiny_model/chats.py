"""Short chats: questions about facts and sums, stories on request, small talk, repeating, and honest refusals."""

from dataclasses import dataclass
from random import Random

from . import facts, rendering, stories, sums, words
from .documents import Document, reply

SYSTEM_TURNS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful assistant that answers in one sentence.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "You are a small language model.",
    "Be concise and correct.",
)
_SMALL_TALK = (
    (
        (
            "Hello",
            "Hello!",
            "Hi",
            "Hi!",
            "Hi there",
            "Hey",
            "Good morning",
            "Good morning!",
            "Hello there!",
            "Say hello.",
        ),
        "Hello! How can I help you?",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Are you a robot?", "Introduce yourself."),
        "I am a toy language model, trained to show how openinfer works.",
    ),
    (("Thank you.", "Thanks!", "Thank you very much!", "Thanks a lot."), "You are welcome!"),
    (("Goodbye.", "Bye!", "See you later.", "Good night."), "Goodbye! Have a nice day."),
    (("How are you?", "How are you today?", "How do you do?"), "I am fine, thank you. How can I help you?"),
    (
        ("What can you do?", "How can you help me?", "What do you know?"),
        "I know some facts, small sums and short stories, and I can call functions.",
    ),
    (("Are you smart?", "Do you know everything?"), "No. I am very small and know only a few things."),
)
_UNKNOWN = (
    "Who will win the election?",
    "What did I eat yesterday?",
    "What is the meaning of life?",
    "Write a program that sorts a list.",
    "Who is {person}?",
    "Explain {topic} to me.",
    "What do you think about {topic}?",
    "What happened in {city} last week?",
    "How old is {person}?",
    "Where did I leave my {thing}?",
)
_REPEAT = ('Repeat after me: "{text}"', 'Say "{text}".', "Repeat this: {text}", 'Please say "{text}".')
_OPENERS = ("Hi! ", "Hello, ", "Please tell me: ", "One question: ", "Quick question. ", "And now: ")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question, the thought behind the answer, and the answer."""

    question: str
    thought: str
    answer: str
    is_sum: bool = False


def document(rng: Random) -> Document:
    """Return a chat of one to three exchanges, the last of which is the target."""
    messages: list[rendering.Message] = []
    if rng.random() < 0.35:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_TURNS)})
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        earlier = exchange(rng)
        messages += [
            {"role": "user", "content": earlier.question},
            {"role": "assistant", "content": earlier.answer},
        ]
    last = exchange(rng)
    messages.append({"role": "user", "content": last.question})
    is_thinking = rng.random() < 0.5
    context = rendering.prompt(messages, thinking=is_thinking)
    return Document("chats", context, reply(last.answer, thought=last.thought if is_thinking else None))


def exchange(rng: Random) -> Exchange:
    """Draw one exchange, most often about a fact."""
    (draw,) = rng.choices((fact, _sum, _story, _small_talk, _unknown, _repeat), weights=(60, 12, 6, 8, 6, 8))
    return draw(rng)


def fact(rng: Random) -> Exchange:
    """Ask for a fact in a wording that is not held out."""
    relation = rng.choice(facts.RELATIONS[:6]) if rng.random() < 0.3 else rng.choice(facts.RELATIONS)
    subject = rng.choice(list(relation.answers))
    asked = [prompt for prompt in facts.prompts(relation, subject, held_out=False) if prompt.form == "question"]
    if not asked:
        return fact(rng)
    question = rng.choice(asked).text
    if rng.random() < 0.1:
        question = rng.choice(_OPENERS) + question
    answer = relation.answers[subject]
    topic = facts.fill(relation.topic, subject)
    thought = rng.choice(("The user asks for {topic}. It is {answer}.", "I am asked for {topic}: {answer}."))
    return Exchange(question, thought.format(topic=topic, answer=answer), statement(relation, subject))


def statement(relation: facts.Relation, subject: str) -> str:
    """Return the fact as a sentence in its plainest wording."""
    return f"{facts.fill(relation.completions[0], subject)} {relation.answers[subject]}."


def _sum(rng: Random) -> Exchange:
    a, b = sums.numbers(rng)
    if rng.random() < 0.65:
        question, sign, result = rng.choice(sums.ADD_QUESTIONS), "+", a + b
    else:
        a, b = max(a, b), min(a, b)
        if sums.is_held_out(a, b):
            return _sum(rng)
        question, sign, result = rng.choice(sums.SUBTRACT_QUESTIONS), "-", a - b
    written = f"{a} {sign} {b} = {result}."
    return Exchange(question.format(a=a, b=b), f"This is a sum: {written}", written, is_sum=True)


def _story(rng: Random) -> Exchange:
    question, text = stories.request_and_story(rng)
    return Exchange(question, "The user wants a story. I will tell a short one.", text)


def _small_talk(rng: Random) -> Exchange:
    questions, answer = rng.choice(_SMALL_TALK)
    return Exchange(rng.choice(questions), "This is small talk. I answer politely.", answer)


def _unknown(rng: Random) -> Exchange:
    question = rng.choice(_UNKNOWN).format(
        person=words.person(rng), topic=rng.choice(words.TOPICS), city=words.city(rng), thing=words.thing(rng)
    )
    return Exchange(question, "I have not learnt anything about this.", "I do not know. I am only a toy model.")


def _repeat(rng: Random) -> Exchange:
    text = rng.choice((rng.choice(words.PHRASES), words.thing(rng), words.person(rng), words.code(rng)))
    if rng.random() < 0.3:
        text = " ".join(words.invented_word(rng) for _ in range(rng.randint(1, 4)))
    return Exchange(rng.choice(_REPEAT).format(text=text), "I only have to repeat the words.", text)
