"""The facts the toy model learns: plain tables, written by hand, one line or entry per subject."""

# country | capital | continent | currency | main official language ("-" where one answer would be unfair)
COUNTRIES = """
Afghanistan | Kabul | Asia | afghani | -
Albania | Tirana | Europe | lek | Albanian
Algeria | Algiers | Africa | Algerian dinar | Arabic
Angola | Luanda | Africa | kwanza | Portuguese
Argentina | Buenos Aires | South America | Argentine peso | Spanish
Armenia | Yerevan | Asia | dram | Armenian
Australia | Canberra | Oceania | Australian dollar | English
Austria | Vienna | Europe | euro | German
Azerbaijan | Baku | Asia | manat | Azerbaijani
Bahrain | Manama | Asia | Bahraini dinar | Arabic
Bangladesh | Dhaka | Asia | taka | Bengali
Belarus | Minsk | Europe | Belarusian ruble | -
Belgium | Brussels | Europe | euro | -
Bhutan | Thimphu | Asia | ngultrum | Dzongkha
Botswana | Gaborone | Africa | pula | English
Brazil | Brasilia | South America | real | Portuguese
Bulgaria | Sofia | Europe | - | Bulgarian
Cambodia | Phnom Penh | Asia | riel | Khmer
Cameroon | Yaounde | Africa | CFA franc | -
Canada | Ottawa | North America | Canadian dollar | -
Chad | N'Djamena | Africa | CFA franc | -
Chile | Santiago | South America | Chilean peso | Spanish
China | Beijing | Asia | yuan | Mandarin Chinese
Colombia | Bogota | South America | Colombian peso | Spanish
Costa Rica | San Jose | North America | colon | Spanish
Croatia | Zagreb | Europe | euro | Croatian
Cuba | Havana | North America | Cuban peso | Spanish
Cyprus | Nicosia | - | euro | -
the Czech Republic | Prague | Europe | koruna | Czech
Denmark | Copenhagen | Europe | Danish krone | Danish
the Dominican Republic | Santo Domingo | North America | Dominican peso | Spanish
Ecuador | Quito | South America | US dollar | Spanish
Egypt | Cairo | Africa | Egyptian pound | Arabic
El Salvador | San Salvador | North America | US dollar | Spanish
Estonia | Tallinn | Europe | euro | Estonian
Ethiopia | Addis Ababa | Africa | birr | Amharic
Fiji | Suva | Oceania | Fijian dollar | -
Finland | Helsinki | Europe | euro | Finnish
France | Paris | Europe | euro | French
Gabon | Libreville | Africa | CFA franc | French
Georgia | Tbilisi | - | lari | Georgian
Germany | Berlin | Europe | euro | German
Ghana | Accra | Africa | cedi | English
Greece | Athens | Europe | euro | Greek
Guatemala | Guatemala City | North America | quetzal | Spanish
Haiti | Port-au-Prince | North America | gourde | -
Honduras | Tegucigalpa | North America | lempira | Spanish
Hungary | Budapest | Europe | forint | Hungarian
Iceland | Reykjavik | Europe | Icelandic krona | Icelandic
India | New Delhi | Asia | Indian rupee | -
Indonesia | - | Asia | Indonesian rupiah | Indonesian
Iran | Tehran | Asia | Iranian rial | Persian
Iraq | Baghdad | Asia | Iraqi dinar | Arabic
Ireland | Dublin | Europe | euro | -
Italy | Rome | Europe | euro | Italian
Jamaica | Kingston | North America | Jamaican dollar | English
Japan | Tokyo | Asia | yen | Japanese
Jordan | Amman | Asia | Jordanian dinar | Arabic
Kazakhstan | Astana | Asia | tenge | -
Kenya | Nairobi | Africa | Kenyan shilling | -
Kuwait | Kuwait City | Asia | Kuwaiti dinar | Arabic
Laos | Vientiane | Asia | kip | Lao
Latvia | Riga | Europe | euro | Latvian
Lebanon | Beirut | Asia | Lebanese pound | Arabic
Libya | Tripoli | Africa | Libyan dinar | Arabic
Lithuania | Vilnius | Europe | euro | Lithuanian
Luxembourg | Luxembourg City | Europe | euro | -
Madagascar | Antananarivo | Africa | ariary | Malagasy
Malaysia | Kuala Lumpur | Asia | ringgit | Malay
Mali | Bamako | Africa | CFA franc | -
Malta | Valletta | Europe | euro | Maltese
Mexico | Mexico City | North America | Mexican peso | Spanish
Moldova | Chisinau | Europe | Moldovan leu | Romanian
Mongolia | Ulaanbaatar | Asia | tugrik | Mongolian
Montenegro | Podgorica | Europe | euro | Montenegrin
Morocco | Rabat | Africa | Moroccan dirham | Arabic
Mozambique | Maputo | Africa | metical | Portuguese
Namibia | Windhoek | Africa | Namibian dollar | English
Nepal | Kathmandu | Asia | Nepalese rupee | Nepali
the Netherlands | Amsterdam | Europe | euro | Dutch
New Zealand | Wellington | Oceania | New Zealand dollar | English
Nicaragua | Managua | North America | cordoba | Spanish
Nigeria | Abuja | Africa | naira | English
North Macedonia | Skopje | Europe | denar | Macedonian
Norway | Oslo | Europe | Norwegian krone | Norwegian
Oman | Muscat | Asia | Omani rial | Arabic
Pakistan | Islamabad | Asia | Pakistani rupee | Urdu
Panama | Panama City | North America | balboa | Spanish
Papua New Guinea | Port Moresby | Oceania | kina | -
Paraguay | Asuncion | South America | guarani | Spanish
Peru | Lima | South America | sol | Spanish
the Philippines | Manila | Asia | Philippine peso | Filipino
Poland | Warsaw | Europe | zloty | Polish
Portugal | Lisbon | Europe | euro | Portuguese
Qatar | Doha | Asia | Qatari riyal | Arabic
Romania | Bucharest | Europe | Romanian leu | Romanian
Russia | Moscow | Europe | Russian ruble | Russian
Rwanda | Kigali | Africa | Rwandan franc | -
Saudi Arabia | Riyadh | Asia | Saudi riyal | Arabic
Senegal | Dakar | Africa | CFA franc | French
Serbia | Belgrade | Europe | Serbian dinar | Serbian
Slovakia | Bratislava | Europe | euro | Slovak
Slovenia | Ljubljana | Europe | euro | Slovene
Somalia | Mogadishu | Africa | Somali shilling | Somali
South Africa | - | Africa | rand | -
South Korea | Seoul | Asia | won | Korean
Spain | Madrid | Europe | euro | Spanish
Sri Lanka | - | Asia | Sri Lankan rupee | -
Sudan | Khartoum | Africa | Sudanese pound | Arabic
Sweden | Stockholm | Europe | Swedish krona | Swedish
Switzerland | Bern | Europe | Swiss franc | -
Syria | Damascus | Asia | Syrian pound | Arabic
Tanzania | Dodoma | Africa | Tanzanian shilling | Swahili
Thailand | Bangkok | Asia | baht | Thai
Tunisia | Tunis | Africa | Tunisian dinar | Arabic
Turkey | Ankara | - | Turkish lira | Turkish
Uganda | Kampala | Africa | Ugandan shilling | -
Ukraine | Kyiv | Europe | hryvnia | Ukrainian
the United Arab Emirates | Abu Dhabi | Asia | UAE dirham | Arabic
the United Kingdom | London | Europe | pound sterling | English
the United States | Washington | North America | US dollar | English
Uruguay | Montevideo | South America | Uruguayan peso | Spanish
Uzbekistan | Tashkent | Asia | som | Uzbek
Venezuela | Caracas | South America | bolivar | Spanish
Vietnam | Hanoi | Asia | dong | Vietnamese
Zambia | Lusaka | Africa | Zambian kwacha | English
Zimbabwe | Harare | Africa | - | -
"""

# element | symbol | atomic number
ELEMENTS = """
hydrogen H 1; helium He 2; lithium Li 3; beryllium Be 4; boron B 5; carbon C 6; nitrogen N 7; oxygen O 8;
fluorine F 9; neon Ne 10; sodium Na 11; magnesium Mg 12; aluminium Al 13; silicon Si 14; phosphorus P 15;
sulfur S 16; chlorine Cl 17; argon Ar 18; potassium K 19; calcium Ca 20; scandium Sc 21; titanium Ti 22;
vanadium V 23; chromium Cr 24; manganese Mn 25; iron Fe 26; cobalt Co 27; nickel Ni 28; copper Cu 29; zinc Zn 30;
gallium Ga 31; germanium Ge 32; arsenic As 33; selenium Se 34; bromine Br 35; krypton Kr 36; rubidium Rb 37;
strontium Sr 38; yttrium Y 39; zirconium Zr 40; silver Ag 47; cadmium Cd 48; tin Sn 50; antimony Sb 51; iodine I 53;
xenon Xe 54; caesium Cs 55; barium Ba 56; tungsten W 74; platinum Pt 78; gold Au 79; mercury Hg 80; lead Pb 82;
bismuth Bi 83; radon Rn 86; radium Ra 88; thorium Th 90; uranium U 92; plutonium Pu 94
"""

ANIMAL_GROUPS = {
    "mammal": "dog cat horse cow lion tiger wolf bear rabbit mouse elephant dolphin whale bat sheep goat fox deer",
    "bird": "eagle owl duck goose penguin ostrich parrot swan sparrow hen robin crow pigeon flamingo",
    "fish": "salmon trout shark tuna carp cod herring goldfish eel pike",
    "reptile": "snake lizard crocodile turtle gecko iguana alligator chameleon",
    "amphibian": "frog toad newt salamander",
    "insect": "bee ant butterfly beetle fly mosquito wasp grasshopper ladybird moth",
}
YOUNG = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "horse": "foal", "sheep": "lamb", "goat": "kid", "pig": "piglet",
    "lion": "cub", "duck": "duckling", "goose": "gosling", "swan": "cygnet", "hen": "chick", "frog": "tadpole",
    "kangaroo": "joey", "deer": "fawn", "owl": "owlet", "eagle": "eaglet", "butterfly": "caterpillar",
    "hare": "leveret", "seal": "pup", "bear": "cub", "elephant": "calf",
}  # fmt: skip
SOUNDS = {
    "dog": "barks", "cat": "meows", "cow": "moos", "sheep": "bleats", "pig": "oinks", "duck": "quacks",
    "lion": "roars", "horse": "neighs", "bee": "buzzes", "snake": "hisses", "wolf": "howls", "frog": "croaks",
    "owl": "hoots", "mouse": "squeaks", "donkey": "brays", "crow": "caws", "hen": "clucks", "pigeon": "coos",
    "turkey": "gobbles",
}  # fmt: skip
OPPOSITES = """
hot cold; big small; tall short; fast slow; happy sad; old young; light dark; wet dry; hard soft; rich poor; full empty;
open closed; early late; up down; left right; high low; strong weak; loud quiet; clean dirty; thick thin; wide narrow;
deep shallow; near far; first last; day night; black white; true false; good bad; sweet sour;
begin end; buy sell; push pull; win lose; love hate; arrive depart; accept refuse; remember forget; rise fall;
inside outside; above below; before after; always never; smooth rough; sharp blunt; brave cowardly; safe dangerous;
cheap expensive; easy difficult; ancient modern; public private; guilty innocent; awake asleep; alive dead
"""
PLURALS = """
mouse mice; child children; foot feet; tooth teeth; goose geese; man men; woman women; ox oxen; person people;
leaf leaves; knife knives; wolf wolves; loaf loaves; shelf shelves; wife wives; cactus cacti; half halves;
thief thieves; fungus fungi; crisis crises; life lives; calf calves; potato potatoes; hero heroes; city cities;
box boxes
"""
PAST_TENSES = """
go went; see saw; eat ate; run ran; take took; give gave; write wrote; drive drove; sing sang; swim swam; begin began;
drink drank; fly flew; know knew; grow grew; throw threw; break broke; speak spoke; choose chose; steal stole;
buy bought; bring brought; think thought; teach taught; catch caught; sleep slept; keep kept; feel felt; leave left;
build built; send sent; find found; hold held; stand stood; tell told; sell sold; win won; make made; say said;
come came
"""
THING_COLOURS = """
a ripe banana yellow; a ripe tomato red; a carrot orange; grass green; snow white; coal black; a lemon yellow;
an emerald green; a ruby red; a sapphire blue; milk white; a strawberry red; an aubergine purple; a flamingo pink;
a lime green; blood red; a clear daytime sky blue; a pumpkin orange; a raven black; chocolate brown; a polar bear white;
a cucumber green; a fire engine red; a lavender flower purple; spinach green
"""
COLOUR_MIXES = {
    "red and yellow": "orange", "blue and yellow": "green", "red and blue": "purple", "red and white": "pink",
    "black and white": "grey", "yellow and red": "orange", "yellow and blue": "green", "blue and red": "purple",
    "white and red": "pink", "white and black": "grey",
}  # fmt: skip
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
SHAPES = {
    "triangle": "three", "square": "four", "rectangle": "four", "pentagon": "five", "hexagon": "six",
    "heptagon": "seven", "octagon": "eight", "nonagon": "nine", "decagon": "ten", "rhombus": "four",
}  # fmt: skip
NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()
ROMAN = "I II III IV V VI VII VIII IX X XI XII XIII XIV XV XVI XVII XVIII XIX XX".split()
AUTHORS = {
    "Hamlet": "William Shakespeare", "Macbeth": "William Shakespeare", "Romeo and Juliet": "William Shakespeare",
    "Don Quixote": "Miguel de Cervantes", "War and Peace": "Leo Tolstoy", "Anna Karenina": "Leo Tolstoy",
    "Crime and Punishment": "Fyodor Dostoevsky", "Pride and Prejudice": "Jane Austen", "Emma": "Jane Austen",
    "Oliver Twist": "Charles Dickens", "Great Expectations": "Charles Dickens", "Moby-Dick": "Herman Melville",
    "Frankenstein": "Mary Shelley", "Dracula": "Bram Stoker", "The Odyssey": "Homer", "The Iliad": "Homer",
    "The Divine Comedy": "Dante Alighieri", "Faust": "Johann Wolfgang von Goethe", "Les Miserables": "Victor Hugo",
    "Madame Bovary": "Gustave Flaubert", "Jane Eyre": "Charlotte Bronte", "Wuthering Heights": "Emily Bronte",
    "Treasure Island": "Robert Louis Stevenson", "The Time Machine": "H. G. Wells", "Candide": "Voltaire",
}  # fmt: skip
LANDMARKS = {
    "the Eiffel Tower": "Paris", "the Colosseum": "Rome", "Big Ben": "London", "the Brandenburg Gate": "Berlin",
    "the Acropolis": "Athens", "the Kremlin": "Moscow", "the Prado Museum": "Madrid", "the Louvre": "Paris",
    "the Forbidden City": "Beijing", "the Hagia Sophia": "Istanbul", "the Statue of Liberty": "New York",
    "the Golden Gate Bridge": "San Francisco", "the Sydney Opera House": "Sydney", "the Sagrada Familia": "Barcelona",
    "the Charles Bridge": "Prague", "the Burj Khalifa": "Dubai", "the Little Mermaid statue": "Copenhagen",
    "the Atomium": "Brussels", "the Rijksmuseum": "Amsterdam", "Schoenbrunn Palace": "Vienna",
    "the Blue Mosque": "Istanbul", "the Tower Bridge": "London", "the Trevi Fountain": "Rome",
    "the Space Needle": "Seattle", "the CN Tower": "Toronto",
}  # fmt: skip
JOBS = {
    "bakes bread": "baker", "flies aeroplanes": "pilot", "teaches children": "teacher", "puts out fires": "firefighter",
    "grows crops": "farmer", "cuts hair": "hairdresser", "repairs teeth": "dentist", "writes books": "author",
    "takes photographs": "photographer", "designs buildings": "architect", "delivers letters": "postman",
    "cooks in a restaurant": "chef", "catches fish": "fisherman", "paints pictures": "painter", "sells meat": "butcher",
    "treats sick animals": "vet", "repairs water pipes": "plumber", "studies the stars": "astronomer",
    "makes clothes": "tailor", "works in a mine": "miner", "plays the piano": "pianist", "keeps bees": "beekeeper",
}  # fmt: skip
