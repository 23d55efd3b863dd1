"""The words questions are made of: English words, names, places, and letters at random."""

from random import Random

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_WORD = 12

WORDS = tuple(
    """
    able about above acid across act actor add adult after again age ago air album all alone among
    angle angry animal ankle answer apple april apron arch area arm army arrow art ash ask atlas
    attic aunt autumn baby back bacon badge bag baker balance balcony ball balloon banana band bank
    barn basket bath beach bean bear beard beautiful bed bee beef bell belt bench berry bicycle big
    bird biscuit black blanket blossom blue board boat body bone book boot bottle bottom bowl box
    boy branch bread breakfast brick bridge bright broom brother brown brush bucket bug build
    bumblebee bus bush butter butterfly button cabbage cable cactus cake calendar camel camera
    camp candle candy canoe canyon cap car card carpet carrot castle cat cave celery chair chalk
    cheese cherry chess chicken child chimney chocolate church circle circus city clay clean clever
    cliff clock cloud clown coach coal coast coat coconut coffee coin cold color comb comet compass
    computer cook cookie copper coral corn cotton couch cousin cow crab cradle crane crayon cream
    creek cricket crow crown cucumber cup curtain daisy dance dark day deep deer dentist desert
    desk diamond dinner dinosaur dish doctor dog doll dolphin donkey door dragon drawer dream dress
    drum duck dust eagle ear earth east easy echo egg eight elbow elephant elevator engine eraser
    evening eye face fairy family fan farm farmer father feather fence fern field fifteen fig
    finger fire fireplace fish flag flame floor flower flute fly fog food foot forest fork fountain
    fox frame friday friend frog fruit garage garden garlic gate ghost giant gift ginger giraffe
    girl glass glove goat gold good goose grape grass green guitar hair hammer hamster hand happy
    harbor hat hawk hazel head heart heavy hedge helicopter helmet hen hill hippo holiday honey
    hood hook horse hospital hotel hour house hummingbird hundred ice idea igloo ink insect iron
    island ivory jacket jam january jar jelly jewel job juice july jungle kangaroo kettle key king
    kitchen kite kitten knee knife knot ladder lake lamb lamp land language lantern laptop lark
    leaf leather lemon leopard letter library light lily lime lion lizard lobster lock log lunch
    machine magic magnet mango map maple marble march market mask maze meadow meal melon metal
    milk mill mirror mississippi mitten monday money monkey moon morning mother motor mountain
    mouse mouth mud mug mushroom music nail name napkin neck needle nest net newspaper night nine
    noodle north nose notebook november number nurse nut oak ocean october octopus office oil old
    olive onion orange orchard otter oven owl page paint palace palm pan panda pants paper parade
    parent park parrot party path peach peanut pear pearl pebble pen pencil penguin people pepper
    photograph piano picnic pie pig pigeon pillow pilot pine pineapple pink pipe pirate pizza plane
    planet plant plate plum pocket pond pony pool popcorn potato pottery pumpkin puppy purple
    puzzle queen quick quiet quilt rabbit radio rain rainbow raspberry rat raven red rice ring
    river road robin robot rock rocket roof room root rope rose round ruby rug ruler sad sail salad
    salmon salt sand sandal sandwich saturday sauce school science scissors sea seal season seed
    september seven shadow shark sheep shelf shell ship shirt shoe shop silk silver sister six
    skate skirt sky sled sleep slow snail snake snow snowflake soap sock sofa soil soup south
    spider spinach spoon spring squirrel stairs star station stone storm stove strawberry street
    string student sugar suit summer sun sunday sunflower swan sweater swim table tail tall tea
    teacher telephone telescope ten tent thumb thunder thursday ticket tiger time toast toe tomato
    tomorrow tongue tooth toothbrush tower town toy tractor train tree triangle truck trumpet tulip
    tunnel turkey turtle twelve twenty umbrella uncle unicorn valley vanilla vase vegetable velvet
    village violet violin volcano wagon wall walnut watch water watermelon wave weather wednesday
    week wheel whistle white wind window winter wizard wolf wood wool word world yacht yard year
    yellow yesterday yogurt zebra zero zoo
    """.split()  # noqa: SIM905 - a list of 700 strings would hide the words
)

NAMES = tuple(
    """
    Ada Alan Alice Amir Ana Anna Ben Bob Carla Chen Clara Dan David Dora Ed Ella Emma Eva Farid
    Felix Finn Fred Grace Hana Hugo Ida Igor Ines Ivan Jack Jane John Jonas Julia Kai Karl Kim Kira
    Lara Lena Leo Lily Lin Lucy Maria Mark Max Maya Mia Nadia Nina Noah Nora Olga Omar Oscar Otto
    Paul Peter Pia Ravi Rosa Ruth Sam Sara Sofia Theo Tim Tom Uma Vera Victor Wei Yara Yuki Zoe
    """.split()  # noqa: SIM905
)

PLACES = tuple(
    """
    Accra Amsterdam Athens Bangkok Beijing Bergen Berlin Bern Bogota Boston Brazil Cairo Canada
    Chicago Chile China Cologne Copenhagen Cuba Dakar Delhi Denmark Dublin Egypt England Finland
    Florence France Geneva Genoa Germany Ghana Greece Hamburg Hanoi Havana Helsinki Iceland India
    Ireland Istanbul Italy Japan Kenya Kyoto Lagos Lima Lisbon London Lyon Madrid Malta Manila
    Mexico Milan Montreal Moscow Munich Nairobi Naples Nepal Norway Osaka Oslo Paris Peru Poland
    Porto Portugal Prague Quito Riga Rome Seoul Seville Spain Stockholm Sweden Sydney Tokyo Toronto
    Tunis Turin Turkey Venice Vienna Warsaw Zurich
    """.split()  # noqa: SIM905
)


def random_letters(rng: Random, shortest: int, longest: int) -> str:
    """Return letters that form no word."""
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(shortest, longest)))


def pronounceable(rng: Random, shortest: int, longest: int) -> str:
    """Return an invented word: vowels and consonants in turn, sometimes doubled."""
    length = rng.randint(shortest, longest)
    word = ""
    vowel = rng.random() < 0.4
    while len(word) < length:
        letter = rng.choice("aeiou" if vowel else "bcdfghjklmnprstvwz")
        word += letter * 2 if rng.random() < 0.15 else letter
        vowel = not vowel
    return word[:length]


def single_word(rng: Random, longest: int = MAX_WORD) -> str:
    """Return a word of 2 to `longest` letters: English, invented, or plain letters."""
    roll = rng.random()
    if roll < 0.4:
        word = rng.choice(WORDS)
        if len(word) <= longest:
            return word
    if roll < 0.7:
        return pronounceable(rng, 3, longest)
    return random_letters(rng, 2, longest)


def in_some_case(rng: Random, word: str) -> str:
    """Return the word as people write it: mostly lower case, now and then Capitalised or UPPER."""
    roll = rng.random()
    if roll < 0.12:
        return word.capitalize()
    return word.upper() if roll < 0.18 else word
