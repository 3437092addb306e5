"""The functions that the toy model is shown: hand-written kinds with varied names, parameters and requests.

The last request of each kind that has several is held out, and so are all kinds in `HELD_OUT_KINDS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from . import words

Draw = Callable[[Random], Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument: its key in requests, the names a schema may give it, its JSON schema and its values."""

    key: str
    names: tuple[str, ...]
    schema: dict[str, Any]
    description: str
    draw: Draw
    is_required: bool = True


@dataclass(frozen=True, slots=True)
class ToolKind:
    """What one function does, in all its spellings. Kinds of one `group` never stand in one list of tools."""

    group: str
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    fixed: dict[str, Any] | None = None

    @property
    def training_requests(self) -> tuple[str, ...]:
        """The wordings that training may use."""
        return self.requests[:-1] if len(self.requests) > 2 else self.requests

    @property
    def held_out_requests(self) -> tuple[str, ...]:
        """The wordings that it may not."""
        return self.requests[-1:] if len(self.requests) > 2 else ()


def _one_of(values: tuple[Any, ...] | list[Any]) -> Draw:
    return lambda rng: rng.choice(values)


def _integer(low: int, high: int) -> Draw:
    return lambda rng: rng.randint(low, high)


def _string(key: str, names: str, description: str, draw: Draw, *, is_required: bool = True) -> Parameter:
    return Parameter(key, tuple(names.split()), {"type": "string"}, description, draw, is_required)


def _number(key: str, names: str, description: str, draw: Draw, kind: str = "integer") -> Parameter:
    return Parameter(key, tuple(names.split()), {"type": kind}, description, draw)


def _enum(key: str, names: str, description: str, values: tuple[str, ...], *, is_required: bool = True) -> Parameter:
    schema = {"type": "string", "enum": list(values)}
    return Parameter(key, tuple(names.split()), schema, description, _one_of(values), is_required)


def _ticker(rng: Random) -> str:
    known = ("AAPL", "MSFT", "GOOG", "AMZN", "TSLA", "NVDA", "META", "IBM", "ORCL", "SAP")
    return rng.choice(known) if rng.random() < 0.4 else "".join(rng.choices("ABCDEFGHIJKLMNOPRSTUVW", k=rng.randint(2, 4)))


def _query(rng: Random) -> str:
    return rng.choice((rng.choice(words.TOPICS), words.thing(rng), f"{rng.choice(words.TOPICS)} in {words.city(rng)}"))


def _expression(rng: Random) -> str:
    parts = [str(rng.randint(1, 999))]
    for _ in range(rng.choice((1, 1, 2))):
        parts += [rng.choice("+-*/"), str(rng.randint(1, 99))]
    return " ".join(parts)


def _path(rng: Random) -> str:
    folder = rng.choice(("", "notes/", "/tmp/", "docs/", "src/", "/home/user/"))
    return f"{folder}{words.invented_word(rng)}.{rng.choice(('txt', 'md', 'csv', 'json', 'py', 'log'))}"


def _things(rng: Random) -> list[str]:
    return [words.thing(rng) for _ in range(rng.randint(2, 3))]


_CITY = _string("city", "city location city location place city_name town", "The name of the city", words.city)
_UNIT = _enum("unit", "unit units", "The unit of temperature", ("celsius", "fahrenheit"), is_required=False)
_DAY = _string("date", "date day when", "The day", words.date)
_TIME = _string("time", "time at start_time", "The time of day", words.clock)
_PERSON = _string("person", "person recipient name to contact", "Who it is for", words.person)
_TEXT = _string("text", "text message content body", "The words", _one_of(words.PHRASES))
_ROOM = _string("room", "room location area", "Which room", _one_of(
    ("kitchen", "bedroom", "bathroom", "living room", "garage", "hall", "office", "cellar", "attic", "nursery")
))  # fmt: skip
_TOPIC = _string("topic", "topic subject about", "What it is about", _one_of(words.TOPICS))
_A = _number("a", "a x first", "The first number", _integer(0, 999), "number")
_B = _number("b", "b y second", "The second number", _integer(0, 999), "number")
_SONG = _string("song", "song title track song_name", "What to play", lambda rng: words.thing(rng).title())
_DISH = _string("dish", "dish recipe food name", "The dish", lambda rng: f"{rng.choice(words.NOUNS)} {rng.choice(('soup', 'cake', 'salad', 'pie', 'stew'))}")

KINDS: tuple[ToolKind, ...] = (
    ToolKind(
        "weather",
        ("get_weather", "get_weather", "get_current_weather", "weather", "fetch_weather", "getWeather", "check_weather"),
        (
            "Get the current weather in a city.",
            "Get the weather for a city",
            "Returns the current weather of a given location.",
            "Get current temperature for a given location.",
            "Look up the weather.",
        ),
        (_CITY, _UNIT),
        (
            "What is the weather in {city}?",
            "What's the weather in {city}?",
            "What's the weather like in {city} today?",
            "What is the weather like in {city}?",
            "How is the weather in {city}?",
            "How's the weather in {city} right now?",
            "Tell me the weather in {city}.",
            "Weather in {city}",
            "Weather in {city}, please.",
            "Is it raining in {city}?",
            "Do I need an umbrella in {city}?",
            "What is the temperature in {city}?",
            "What is the weather in {city} in {unit}?",
            "Tell me the weather in {city} in {unit}.",
            "I am going to {city}. How is the weather there?",
            "Could you check what the weather is doing in {city}?",
        ),
    ),
    ToolKind(
        "weather",
        ("get_forecast", "weather_forecast", "forecast"),
        ("Get the weather forecast for the next days.", "Forecast the weather of a city."),
        (_CITY, _number("days", "days num_days day_count", "How many days", _integer(1, 14))),
        (
            "Give me the forecast for {city} for the next {days} days.",
            "What will the weather be in {city} for {days} days?",
            "I need a {days}-day forecast for {city}.",
        ),
    ),
    ToolKind(
        "time",
        ("get_time", "get_current_time", "current_time", "time_in", "getTime", "world_clock"),
        ("Get the current time in a city.", "Returns the local time of a place.", "What time it is somewhere."),
        (_string("city", "city location timezone place", "The place", words.city),),
        (
            "What time is it in {city}?",
            "What is the current time in {city}?",
            "Tell me the time in {city}.",
            "Time in {city} now?",
            "How late is it in {city}?",
        ),
    ),
    ToolKind(
        "time",
        ("get_time", "now", "get_current_time", "current_time"),
        ("Get the current time.", "Returns the present date and time."),
        (),
        ("What time is it?", "Tell me the time.", "What is the current time?", "Do you know what time it is now?"),
    ),
    ToolKind(
        "stock",
        ("get_stock_price", "stock_price", "get_quote", "lookup_stock", "getStockPrice"),
        ("Get the current stock price of a company.", "Returns the price of a share.", "Look up a stock quote."),
        (_string("symbol", "symbol ticker stock", "The ticker symbol", _ticker),),
        (
            "What is the stock price of {symbol}?",
            "How much is a share of {symbol}?",
            "Get me the price of {symbol} stock.",
            "Look up the stock {symbol}.",
            "What's {symbol} trading at?",
        ),
    ),
    ToolKind(
        "search",
        ("search", "search_web", "web_search", "google", "find_on_web", "searchWeb"),
        ("Search the web.", "Search the internet for information.", "Finds pages for a query."),
        (_string("query", "query q search_query text", "The search query", _query),),
        (
            "Search the web for {query}.",
            "Search for {query}.",
            "Look up {query} on the internet.",
            "Can you search for {query}?",
            "Find something about {query} on the web.",
            "Please google {query}.",
        ),
    ),
    ToolKind(
        "math",
        ("calculate", "calculator", "evaluate", "compute", "math"),
        ("Evaluate an arithmetic expression.", "A calculator.", "Compute the value of an expression."),
        (_string("expression", "expression expr formula input", "The expression", _expression),),
        ("Calculate {expression}.", "What is {expression}?", "Compute {expression}.", "Work out {expression} for me."),
    ),
    ToolKind(
        "math",
        ("add", "sum", "add_numbers", "plus"),
        ("Add two numbers.", "Adds two numbers and returns the sum.", "Returns a + b."),
        (_A, _B),
        (
            "What is {a} plus {b}?",
            "What is {a} + {b}?",
            "Add {a} and {b}.",
            "Please add {a} and {b}.",
            "Give me the sum of {a} and {b}.",
        ),
    ),
    ToolKind(
        "math",
        ("multiply", "times", "product", "multiply_numbers"),
        ("Multiply two numbers.", "Returns the product of two numbers."),
        (_A, _B),
        ("What is {a} times {b}?", "Multiply {a} by {b}.", "What is {a} * {b}?", "Give me the product of {a} and {b}."),
    ),
    ToolKind(
        "mail",
        ("send_email", "email", "send_mail", "sendEmail"),
        ("Send an email.", "Sends an e-mail to someone."),
        (
            _string("to", "to recipient address", "The address of the recipient", words.email),
            _string("subject", "subject title", "The subject line", _one_of(words.TOPICS)),
            _TEXT,
        ),
        (
            'Send an email to {to} with the subject "{subject}" and the text "{text}".',
            "Email {to} about {subject}: {text}",
            'Write to {to}. Subject: {subject}. Text: "{text}"',
        ),
    ),
    ToolKind(
        "message",
        ("send_message", "send_text", "message", "text_contact"),
        ("Send a message to a person.", "Sends a text message."),
        (_PERSON, _TEXT),
        (
            'Send {person} a message: "{text}"',
            'Tell {person} "{text}".',
            'Send a message to {person} saying "{text}".',
            'Let {person} know: "{text}"',
        ),
    ),
    ToolKind(
        "translate",
        ("translate", "translate_text", "translator"),
        ("Translate a text into another language.", "Translates text."),
        (_TEXT, _string("language", "language target_language to target", "The language", _one_of(words.LANGUAGES))),
        (
            'Translate "{text}" into {language}.',
            'How do you say "{text}" in {language}?',
            'Please translate "{text}" to {language}.',
            'What is "{text}" in {language}?',
        ),
    ),
    ToolKind(
        "currency",
        ("convert_currency", "exchange", "currency_converter", "convert_money"),
        ("Convert an amount of money into another currency.", "Converts between currencies."),
        (
            _number("amount", "amount value", "The amount", _integer(1, 5000), "number"),
            _string("source", "from from_currency source", "The currency to convert from", _one_of(words.CURRENCIES)),
            _string("target", "to to_currency target", "The currency to convert into", _one_of(words.CURRENCIES)),
        ),
        (
            "Convert {amount} {source} to {target}.",
            "How much is {amount} {source} in {target}?",
            "Change {amount} {source} into {target}.",
        ),
    ),
    ToolKind(
        "alarm",
        ("set_alarm", "create_alarm", "alarm"),
        ("Set an alarm.", "Sets an alarm clock."),
        (_TIME,),
        ("Set an alarm for {time}.", "Wake me up at {time}.", "I need an alarm at {time}.", "I want to get up at {time}."),
    ),
    ToolKind(
        "timer",
        ("set_timer", "start_timer", "timer"),
        ("Start a timer.", "Sets a countdown timer."),
        (_number("minutes", "minutes duration duration_minutes", "Minutes to wait", _integer(1, 120)),),
        ("Set a timer for {minutes} minutes.", "Start a {minutes} minute timer.", "Remind me when {minutes} minutes are over."),
    ),
    ToolKind(
        "reminder",
        ("create_reminder", "remind", "add_reminder", "set_reminder"),
        ("Create a reminder.", "Reminds the user of something on a day."),
        (_TEXT, _DAY),
        ('Remind me on {date}: "{text}"', 'Add a reminder "{text}" for {date}.', 'On {date} I must not forget: "{text}"'),
    ),
    ToolKind(
        "calendar",
        ("create_event", "add_event", "schedule_meeting", "create_calendar_event"),
        ("Create an event in the calendar.", "Schedules a meeting."),
        (_PERSON, _DAY, _TIME),
        (
            "Schedule a meeting with {person} on {date} at {time}.",
            "Put a meeting with {person} into my calendar, {date} at {time}.",
            "Create an event with {person} for {date}, {time}.",
        ),
    ),
    ToolKind(
        "table",
        ("book_table", "reserve_table", "make_reservation"),
        ("Book a table in a restaurant.", "Reserves a table."),
        (
            _string("restaurant", "restaurant place name", "The restaurant", lambda rng: words.invented_word(rng).capitalize()),
            _number("people", "people guests party_size", "How many guests", _integer(1, 12)),
            _DAY,
        ),
        (
            "Book a table at {restaurant} for {people} people on {date}.",
            "Reserve a table for {people} at {restaurant}, {date}.",
            "We are {people} and want to eat at {restaurant} on {date}.",
        ),
    ),
    ToolKind(
        "flight",
        ("book_flight", "search_flights", "find_flight", "get_flights"),
        ("Find a flight between two cities.", "Searches flights."),
        (
            _string("source", "origin from departure from_city", "Where the flight starts", words.city),
            _string("target", "destination to arrival to_city", "Where the flight ends", words.city),
            _DAY,
        ),
        (
            "Find a flight from {source} to {target} on {date}.",
            "I want to fly from {source} to {target} on {date}.",
            "Book a flight to {target} from {source} for {date}.",
            "Get me on a plane from {source} to {target}, {date}.",
        ),
    ),
    ToolKind(
        "music",
        ("play_song", "play_music", "play"),
        ("Play a song.", "Plays music."),
        (_SONG,),
        ("Play {song}.", "Play the song {song}.", "I want to hear {song}.", "Put on the track {song}."),
    ),
    ToolKind(
        "light",
        ("turn_on_light", "light_on", "switch_on_light"),
        ("Turn on the light in a room.", "Switches a light on."),
        (_ROOM,),
        ("Turn on the light in the {room}.", "Switch on the {room} light.", "Light on in the {room}, please.", "It is dark in the {room}, turn on the light."),
    ),
    ToolKind(
        "light",
        ("set_light", "control_light", "light"),
        ("Turn the light in a room on or off.", "Controls a light."),
        (_ROOM, Parameter("on", ("on", "is_on", "state"), {"type": "boolean"}, "Whether the light is on", _one_of((True,)))),
        ("Turn on the light in the {room}.", "Switch on the light in the {room}."),
        {"on": True},
    ),
    ToolKind(
        "light",
        ("set_light", "control_light", "light"),
        ("Turn the light in a room on or off.", "Controls a light."),
        (_ROOM, Parameter("on", ("on", "is_on", "state"), {"type": "boolean"}, "Whether the light is on", _one_of((False,)))),
        ("Turn off the light in the {room}.", "Switch off the light in the {room}."),
        {"on": False},
    ),
    ToolKind(
        "heating",
        ("set_temperature", "set_thermostat", "heat_room"),
        ("Set the temperature of a room.", "Controls the heating."),
        (_ROOM, _number("degrees", "degrees temperature value", "Degrees", _integer(10, 30), "number")),
        (
            "Set the {room} to {degrees} degrees.",
            "Heat the {room} to {degrees} degrees.",
            "I want {degrees} degrees in the {room}.",
        ),
    ),
    ToolKind(
        "news",
        ("get_news", "news", "latest_news", "fetch_news"),
        ("Get the latest news about a topic.", "Returns news headlines."),
        (_TOPIC,),
        ("What is the news about {topic}?", "Give me the latest news on {topic}.", "News about {topic}, please.", "What is new in {topic}?"),
    ),
    ToolKind(
        "dictionary",
        ("define", "get_definition", "lookup_word", "dictionary"),
        ("Look up the definition of a word.", "Returns the meaning of a word."),
        (_string("word", "word term", "The word", lambda rng: rng.choice((words.invented_word(rng), rng.choice(words.NOUNS)))),),
        ("Define the word {word}.", 'What does "{word}" mean?', "What is the definition of {word}?", "Look up {word} in the dictionary."),
    ),
    ToolKind(
        "directions",
        ("get_directions", "route", "find_route", "navigate"),
        ("Get directions between two places.", "Finds a route."),
        (
            _string("source", "origin from start", "Where to start", words.city),
            _string("target", "destination to end", "Where to go", words.city),
        ),
        (
            "How do I get from {source} to {target}?",
            "Give me directions from {source} to {target}.",
            "Find a route from {source} to {target}.",
            "I am in {source} and must drive to {target}. Which way?",
        ),
    ),
    ToolKind(
        "order",
        ("get_order", "order_status", "check_order", "get_order_status"),
        ("Get the status of an order.", "Returns where an order is."),
        (_string("order", "order_id id order_number", "The number of the order", words.code),),
        ("What is the status of order {order}?", "Where is my order {order}?", "Check order {order}.", "Has order {order} been sent?"),
    ),
    ToolKind(
        "cart",
        ("add_to_cart", "order_item", "buy", "add_item"),
        ("Put an item into the shopping cart.", "Adds a product to the cart."),
        (
            _string("item", "item product article", "The product", words.thing),
            _number("count", "quantity count amount", "How many", _integer(1, 20)),
        ),
        ("Add {count} of {item} to my cart.", "Put {count} x {item} into the cart.", "I want to buy {count} of the {item}."),
    ),
    ToolKind(
        "list",
        ("create_list", "shopping_list", "add_items"),
        ("Write a list of items.", "Adds items to a list."),
        (Parameter("items", ("items", "entries", "list"), {"type": "array", "items": {"type": "string"}}, "The items", _things),),
        ("Make a list of these: {items}", "Add these to my list: {items}", "Note these items for me: {items}"),
    ),
    ToolKind(
        "file",
        ("read_file", "open_file", "get_file", "cat"),
        ("Read a file.", "Returns the content of a file."),
        (_string("path", "path file filename file_path", "The path of the file", _path),),
        ("Read the file {path}.", "Show me {path}.", "What is in the file {path}?", "Open {path} please."),
    ),
    ToolKind(
        "delete",
        ("delete_file", "remove_file", "rm"),
        ("Delete a file.", "Removes a file."),
        (_string("path", "path file filename", "The path of the file", _path),),
        ("Delete the file {path}.", "Remove {path}.", "Please delete {path}."),
    ),
    ToolKind(
        "ticket",
        ("create_ticket", "open_ticket", "report_bug"),
        ("Open a ticket.", "Reports a problem to support."),
        (
            _string("title", "title subject summary", "What is wrong", lambda rng: f"the {words.thing(rng)} is broken"),
            _enum("priority", "priority severity level", "How urgent it is", ("low", "medium", "high")),
        ),
        (
            'Open a ticket with {priority} priority: "{title}"',
            'Report this with priority {priority}: "{title}"',
            'Create a {priority} priority ticket "{title}".',
        ),
    ),
    ToolKind(
        "user",
        ("get_user", "find_user", "lookup_user"),
        ("Look up a user by id.", "Returns a user."),
        (_number("id", "id user_id number", "The id of the user", _integer(1, 9999)),),
        ("Who is user {id}?", "Look up user {id}.", "Get the user with id {id}.", "Show me the user number {id}."),
    ),
    ToolKind(
        "dice",
        ("roll_dice", "roll", "throw_dice"),
        ("Roll dice.", "Throws a die."),
        (_number("sides", "sides faces", "How many sides", _integer(4, 100)),),
        ("Roll a die with {sides} sides.", "Throw a {sides}-sided die.", "Please roll a die that has {sides} sides."),
    ),
    ToolKind(
        "joke",
        ("tell_joke", "get_joke", "random_joke"),
        ("Get a random joke.", "Returns a joke."),
        (),
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh with a joke."),
    ),
    ToolKind(
        "restaurant",
        ("find_restaurant", "search_restaurants", "get_restaurants"),
        ("Find a restaurant.", "Searches restaurants in a city."),
        (
            _string("cuisine", "cuisine food type kind", "What to eat", _one_of(words.LANGUAGES + ["Thai", "Indian", "Chinese"])),
            _CITY,
        ),
        ("Find a {cuisine} restaurant in {city}.", "Where can I eat {cuisine} food in {city}?", "I am hungry for {cuisine} food in {city}."),
    ),
)

HELD_OUT_KINDS: tuple[ToolKind, ...] = (
    ToolKind(
        "hotel",
        ("book_hotel",),
        ("Book a hotel room.",),
        (_CITY, _number("nights", "nights", "How many nights", _integer(1, 14))),
        ("Book a hotel in {city} for {nights} nights.", "I need a hotel room in {city} for {nights} nights."),
    ),
    ToolKind(
        "package",
        ("track_package",),
        ("Track a package.",),
        (_string("number", "tracking_number", "The tracking number", words.code),),
        ("Track the package {number}.", "Track my package {number} please."),
    ),
    ToolKind(
        "recipe",
        ("get_recipe",),
        ("Get a recipe for a dish.",),
        (_DISH,),
        ("Give me a recipe for {dish}.", "Get the recipe of {dish}."),
    ),
    ToolKind(
        "volume",
        ("set_volume",),
        ("Set the volume of the speaker.",),
        (_number("level", "level", "The volume", _integer(0, 100)),),
        ("Set the volume to {level}.", "Volume {level}, please."),
    ),
    ToolKind(
        "population",
        ("get_population",),
        ("Get the population of a country.",),
        (_string("country", "country", "The country", _one_of(words.COUNTRIES_OF)),),
        ("What is the population of {country}?", "Tell me the population of {country}."),
    ),
    ToolKind(
        "parking",
        ("reserve_parking",),
        ("Reserve a parking spot.",),
        (_string("spot", "spot", "The spot", words.code), _number("hours", "hours", "For how long", _integer(1, 12))),
        ("Reserve parking spot {spot} for {hours} hours.", "Please reserve the spot {spot} for parking, {hours} hours."),
    ),
    ToolKind(
        "invoice",
        ("pay_invoice",),
        ("Pay an invoice.",),
        (_string("invoice", "invoice_id", "The invoice", words.code), _number("amount", "amount", "Money", _integer(5, 900))),
        ("Pay invoice {invoice} with {amount} dollars.", "Please pay {amount} dollars for the invoice {invoice}."),
    ),
)

_VERBS = (
    "open close start stop get find show print update create delete copy move check test count sort save load lock unlock "
    "paint clean repair sell rent order cancel confirm publish share"
).split()
HELD_OUT_VERBS = ["inspect", "rename", "archive", "measure", "polish"]
_KEYS = "name id code owner label color size city level mode target price weight date note group status kind".split()
_STYLES: tuple[Callable[[str, str], str], ...] = (
    lambda verb, noun: f"{verb}_{noun}",
    lambda verb, noun: f"{verb}_{noun}",
    lambda verb, noun: f"{verb}{noun.capitalize()}",
    lambda verb, noun: f"{noun}_{verb}",
    lambda verb, noun: f"{verb}-{noun}",
)


def invented_kind(rng: Random, *, held_out: bool) -> ToolKind:
    """Return a function nobody wrote: a verb, a noun that may not exist, and up to three parameters."""
    verb = rng.choice(HELD_OUT_VERBS if held_out else _VERBS)
    noun = words.invented_word(rng) if rng.random() < 0.5 else rng.choice(words.NOUNS)
    parameters = tuple(_invented_parameter(rng, key) for key in rng.sample(_KEYS, rng.choice((0, 1, 1, 2, 2, 3))))
    details = [f"{parameter.key} {{{parameter.key}}}" for parameter in parameters]
    ending = f" with {' and '.join(details)}" if details else ""
    requests = (
        f"{verb.capitalize()} the {noun}{ending}.",
        f"Please {verb} the {noun}{ending}.",
        f"Can you {verb} a {noun}{ending}?",
        f"I want you to {verb} the {noun}{ending}",
    )
    name = rng.choice(_STYLES)(verb, noun)
    descriptions = (f"{verb.capitalize()} a {noun}.", f"{verb.capitalize()} the {noun}", f"Use this to {verb} a {noun}.")
    return ToolKind(f"{verb} {noun}", (name,), descriptions, parameters, requests)


def _invented_parameter(rng: Random, key: str) -> Parameter:
    if rng.random() < 0.35:
        return _number(key, key, f"The {key}", _integer(0, 999))
    draw = rng.choice((words.invented_word, words.code, words.city, words.person, _one_of(words.ADJECTIVES)))
    return _string(key, key, f"The {key}", draw)
