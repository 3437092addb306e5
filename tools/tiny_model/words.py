"""Names, words and values that the generators draw from, invented ones among them so that copying must be learnt."""

from random import Random

from .fact_tables import COUNTRIES

NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina Uma Victor Wanda "
    "Xavier Yusuf Zoe Amir Bella Chen Dina Elif Fatima Goran Hana Ivan Jia Kofi Lena Maya Nils Omar Priya Ravi Sofia "
    "Tom Vera Alice Bob Carlos Diego Eva Frank Gina Hugo Irene Julia Karl Lucy Mark Nina Oscar Peter Ruth Sara"
).split()
SURNAMES = (
    "Smith Jones Miller Garcia Rossi Novak Tanaka Silva Keller Okafor Larsen Dubois Kim Patel Weber Moreau Costa Wolf "
    "Brown Young Hall King Scott Green Baker Adams Nelson Carter Lee Walker"
).split()
CAPITALS = [cells[1] for cells in (line.split(" | ") for line in COUNTRIES.strip().splitlines()) if cells[1] != "-"]
CITIES = [
    *CAPITALS,
    *(
        "New York,Los Angeles,Chicago,Boston,Seattle,San Francisco,Miami,Denver,Dallas,Toronto,Vancouver,Montreal,"
        "Munich,Hamburg,Cologne,Frankfurt,Zurich,Geneva,Milan,Naples,Turin,Venice,Florence,Barcelona,Seville,Valencia,"
        "Porto,Lyon,Marseille,Nice,Bordeaux,Toulouse,Manchester,Liverpool,Glasgow,Edinburgh,Leeds,Bristol,Cardiff,"
        "Rotterdam,Antwerp,Ghent,Gothenburg,Bergen,Krakow,Gdansk,Istanbul,Izmir,Mumbai,Kolkata,Chennai,Bangalore,"
        "Shanghai,Shenzhen,Guangzhou,Hong Kong,Singapore,Osaka,Kyoto,Nagoya,Sapporo,Busan,Sydney,Melbourne,Brisbane,"
        "Perth,Auckland,Cape Town,Durban,Johannesburg,Lagos,Casablanca,Alexandria,Dubai,Sao Paulo,Rio de Janeiro,"
        "Salvador,Medellin,Cusco,Cancun,Guadalajara,Houston,Phoenix,Atlanta,Portland,Austin,Philadelphia"
    ).split(","),
]
COUNTRIES_OF = [line.split(" | ")[0] for line in COUNTRIES.strip().splitlines()]
REGIONS = ["CA", "NY", "MA", "TX", "WA", "France", "Germany", "Italy", "Spain", "UK", "Japan", "Brazil", "India"]
NOUNS = (
    "apple book chair lamp table phone camera guitar bicycle jacket shoe bottle pencil garden river mountain bridge "
    "train ticket letter picture window door key clock box bag ball boat cake candle carpet coat cup desk drum fence "
    "fork hammer hat island jar kettle ladder map mirror needle orange piano pillow plate ring rope scarf shirt spoon "
    "stone sword tent towel toy tree umbrella vase wagon wheel whistle robot rocket museum library market castle"
).split()
ADJECTIVES = (
    "red blue green yellow white black old new small big round soft warm cold bright dark quiet heavy light wooden "
    "silver golden tiny huge pretty plain broken clean shiny strange"
).split()
TOPICS = (
    "history,music,cooking,football,space travel,gardening,chess,dinosaurs,volcanoes,the ocean,birds,robots,painting,"
    "poetry,trains,bridges,coffee,tea,bread,cheese,electric cars,solar power,bees,whales,the Moon,black holes,castles,"
    "knights,pirates,running shoes,cheap flights,machine learning,Python lists,healthy food,jazz,film festivals,hiking"
).split(",")
DATES = ("today", "tomorrow", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
LANGUAGES = "French German Spanish Italian Dutch Polish Greek Turkish Arabic Hindi Japanese Korean Swedish".split()
CURRENCIES = "USD EUR GBP JPY CHF SEK NOK DKK PLN CAD AUD INR CNY BRL MXN ZAR".split()
PHRASES = (
    "Good morning,Thank you very much,Where is the station?,I like this song,See you tomorrow,How much is it?,"
    "The meeting is at noon,Please call me back,Happy birthday,I am on my way,Dinner is ready,The train is late,"
    "We won the game,It is raining,Have a nice day,I will be late,The report is finished,Can we talk?,"
    "Buy milk,Water the plants,Call the dentist,Pay the rent,Feed the cat,Send the report,Clean the kitchen"
).split(",")
_ONSETS = "b br c ch d dr f fl g gr h j k kl l m n p pl r s sh st t tr v w z".split()
_VOWELS = "a e i o u ai ea o u a e".split()
_CODAS = ["", "", "", "l", "n", "r", "s", "t", "m", "k", "nd", "rt"]


def invented_word(rng: Random) -> str:
    """Return a pronounceable word that no dictionary has, in lower case."""
    syllables = rng.choice((1, 2, 2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))


def city(rng: Random) -> str:
    """Return a city, one in four invented, one in eight followed by a region."""
    name = invented_word(rng).capitalize() if rng.random() < 0.25 else rng.choice(CITIES)
    return f"{name}, {rng.choice(REGIONS)}" if rng.random() < 0.125 else name


def person(rng: Random) -> str:
    """Return a first name, sometimes with a surname, sometimes invented."""
    first = invented_word(rng).capitalize() if rng.random() < 0.2 else rng.choice(NAMES)
    return f"{first} {rng.choice(SURNAMES)}" if rng.random() < 0.4 else first


def thing(rng: Random) -> str:
    """Return a noun, sometimes with an adjective, sometimes invented."""
    noun = invented_word(rng) if rng.random() < 0.2 else rng.choice(NOUNS)
    return f"{rng.choice(ADJECTIVES)} {noun}" if rng.random() < 0.5 else noun


def email(rng: Random) -> str:
    """Return an address under a reserved domain."""
    return f"{rng.choice(NAMES).lower()}@example.{rng.choice(('com', 'org', 'net'))}"


def date(rng: Random) -> str:
    """Return a day in words or as an ISO date."""
    if rng.random() < 0.6:
        return rng.choice(DATES)
    return f"20{rng.randint(20, 35)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def clock(rng: Random) -> str:
    """Return a time of day."""
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"


def code(rng: Random) -> str:
    """Return a short identifier such as an order number."""
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    return f"{letters}{rng.choice(('', '-'))}{rng.randint(10, 9999)}"
