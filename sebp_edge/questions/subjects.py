"""What a note is about, and how a question names it."""

import re
from dataclasses import dataclass

from sebp_edge.questions.facts import lower_first, upper_first
from sebp_edge.questions.word_lists import is_genitive, listed

_FIRST_DATE = re.compile(r"^\d{4}[-_.]?\d{2}[-_.]?\d{2}[-_ ]*")
_EXTENSION = re.compile(r"\.[A-Za-z0-9]{1,5}$")
_WITHIN = re.compile(r"(?<=[a-z,;)] )([A-Z][\w'’-]*)")
_LOWER = re.compile(r"\b[a-z][\w-]+")
_PLAIN_TITLE = re.compile(r"[\w'’& .-]+")
_PREPOSITION = re.compile(r" (?:in|on|of|at|for|with|to|from|and|by|under|behind) ", re.IGNORECASE)
DETERMINERS = listed(
    """
    the a an my our your his her their its this that these those
    """
)
FUNCTION_WORDS = listed(
    """
    the a an and or but of to in on at for with from by is are was were be been has have had it its this that these
    those i we you he she they my our your his her their not no do does did will can must should would could may if
    as so then than there here what which who when where how why all every each some any one after before about into
    over under behind until because
    """
)
_FOREIGN = listed(
    """
    der die das und ist nicht ein eine den dem mit von zu für auf im och att det som en ett är på av inte med le la
    les et est un une des du dans pour pas avec sur el los las y es una por para que del il lo gli che di non per um
    uma não com em het een niet voor og er ikke jeg
    """
)
# Common nouns that stand alone as titles.
_COMMON = listed(
    """
    attic balcony bank basement bathroom bedroom bicycle bike boat boiler budget cabin camera car cat cellar club
    computer cooker cottage dentist dishwasher doctor dog door dryer fence ferry fireplace freezer fridge garage
    garden gate greenhouse gym hedge heater house insurance kitchen laptop lawn library lift loft mailbox microwave
    mortgage mower neighbour neighbours neighbor oven phone piano pantry passport pharmacy plumber pond pool printer
    project radiator recipe roof router school server shed shop shower sofa studio stove tent thermostat toilet trip
    van vet wedding washer breakfast lunch dinner supper water rent parking entry admission delivery milk spare next
    coffee tea bread salt sugar snow rain heating training mail post check-in check-out payment website wifi window
    workshop chimney landlord apartment flat office rent electricity trash bins
    """
)
# Other common nouns, which notes begin sentences with: "Label is copper".
_BARE_NOUNS = listed(
    """
    alarm apology arrival ballast battery bed box brush bulb bus cable cache certificate chain chair charger colour
    color compost concert cost date deadline departure deposit depth distance entrance exhibition exit fault fee fees
    file filter flight form fuse handle header height hinge hose hostname hotel invoice key keys label ladder lamp
    larder leaflet length letter lock luggage mass match medicine moisture nail number package paint pallet paper
    parcel password photo pipe plane plant plants platform plot plug power present pressure price prices programme
    pump quote rate rates receipt rehearsal resource ring sample screw seat seed seeds series size sketch socket soil
    spot sticker stock suitcase switch system table tablets tank tap temperature term test ticket tickets time timer
    tools total train tram trays tree trees truck valve wall weather weight width wiring wood work
    """
)
# Words that begin sentences, and are not their whole subject: of "Second set of keys with Gisela", "second" is not.
_NO_SUBJECTS = listed(
    """
    two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen twenty thirty first
    second third half several both more most many few other others another fresh free new old lower upper worst best
    negative positive often already also completely newly usually probably maybe perhaps otherwise cannot
    tried updated sowed planted replaced repaired fixed painted ordered paid booked bought sold called returned moved
    added removed changed cleaned washed checked tested measured mended stored borrowed cancelled planned
    """
)
_NO_NAMES = _COMMON | _BARE_NOUNS | _NO_SUBJECTS | FUNCTION_WORDS
_COMMON_END = re.compile(
    r"(?:tion|sion|ment|ness|ing|ship|age|soup|cake|tart|pie|bread|sauce|jam|party|trip|list|plan|log|notes|meeting"
    r"|appointment|machine|project|plants?|details|info|guide|house|garden|account|manual|minutes|wishes|review)$",
    re.IGNORECASE,
)
_PLURAL = re.compile(r"(?:[^aisuo]|e)s$")
_PERSON_TITLE = re.compile(r"(?:Dr|Mr|Mrs|Ms|Prof|Aunt|Uncle|Grandma|Grandpa|Granny)\b\.?")
_KIN = re.compile(
    r"(?:(?:my|our|his|her|their|the) )?(?:\w+ )?(?:mum|mom|dad|mother|father|sister|brother|son|daughter|wife|husband"
    r"|aunt|uncle|cousin|friend|boss|colleague|neighbou?r|doctor|dentist|plumber|electrician|teacher|landlord"
    r"|landlady|vet|nurse|customer|client|captain|foreman|chef|baker|mechanic|carpenter|painter|cook|tenant|owner"
    r"|grandmother|grandfather|gardener|manager)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Words:
    """How a note writes its words: those in lower case, and those with a capital within a sentence."""

    lower: frozenset[str]
    names: frozenset[str]

    def is_name(self, word: str) -> bool:
        """Whether a word that begins with a capital is a name; at the beginning of a sentence it need not be."""
        bare = re.sub(r"['’]s?$", "", word)
        if bare in self.names or not bare[1:].islower():
            return True
        low = bare.lower()
        return low not in self.lower and low not in _NO_NAMES


@dataclass(frozen=True, slots=True)
class Subject:
    """What a note or a section is about.

    Attributes:
        title: as the note writes it; empty if there is none.
        phrase: the title as a part of a sentence, "the garden gate"; None if it is no noun phrase.
        is_person: whether it is surely or probably a person's name.
    """

    title: str
    phrase: str | None = None
    is_person: bool = False

    @property
    def topic(self) -> str | None:
        """What to put after "about"."""
        return self.phrase or (f'"{self.title}"' if self.title else None)

    @property
    def bare(self) -> str:
        """The title as keywords."""
        return re.sub(r"^the ", "", self.phrase) if self.phrase else self.title


def words_of(text: str) -> Words:
    return Words(frozenset(_LOWER.findall(text)), frozenset(_WITHIN.findall(text)))


def title_from_name(name: str | None) -> str:
    """Returns a title made of a file's name, without a date at its beginning."""
    stem = re.split(r"[/\\]", name or "")[-1]
    stem = _EXTENSION.sub("", stem) if re.search(r"[^.\d]\.[A-Za-z]\w{0,4}$", stem) else stem
    rest = _FIRST_DATE.sub("", stem)
    return re.sub(r"[\s_-]+", " ", rest).strip() if re.search(r"[^\W\d_]", rest) else ""


def subject_of(title: str, words: Words, *, is_english: bool) -> Subject:
    title = re.sub(r"\s+", " ", title).strip(" .:#*_-–")
    if not title or len(title) > 90:
        return Subject("")
    if title.isupper() and (len(title) > 5 or title.lower() in words.lower):
        parts = [part if part in words.names else part.lower() for part in title.title().split()]
        title = upper_first(" ".join(parts))
    if not is_english or len(title.split()) > 6 or not _PLAIN_TITLE.fullmatch(title) or any(map(str.isdigit, title)):
        return Subject(title)
    return Subject(title, _phrase(title, words), is_person_name(title, words))


def is_person_name(text: str, words: Words) -> bool:
    """Whether a text is a person's name or a relation, as far as its words tell."""
    if _PERSON_TITLE.match(text) or _KIN.fullmatch(text):
        return True
    parts = re.sub(r" and ", " ", text).split()
    return (
        0 < len(parts) <= 6
        and all(part[:1].isupper() and part[1:].islower() and part.isalpha() for part in parts)
        and all(words.is_name(part) for part in parts)
        and not _COMMON_END.search(text)
    )


def is_common(word: str) -> bool:
    """Whether a word is surely the name of a kind of thing."""
    return word in _COMMON


def is_bare_noun(word: str) -> bool:
    """Whether a word is a common noun that notes begin sentences with, without its article."""
    return word.lower() in _BARE_NOUNS


def is_no_subject(word: str) -> bool:
    """Whether a word that begins a sentence is not taken for its whole subject, as "second" or "often"."""
    return word.lower() in _NO_SUBJECTS


def is_relation(text: str) -> bool:
    """Whether a text says what someone is, as "my sister" or "the captain of the ferry"."""
    return bool(_KIN.match(text))


def is_surely_person(name: str) -> bool:
    """Whether a name is a person's rather than that of a place or a book."""
    if _PERSON_TITLE.match(name) or _KIN.fullmatch(name):
        return True
    return " " in name and not name.lower().startswith(("the ", "a ", "my ", "our ")) and name.istitle()


def _phrase(title: str, words: Words) -> str | None:
    parts = title.split()
    first = parts[0].lower()
    if first in DETERMINERS:
        return lower_first(title)
    if first in FUNCTION_WORDS or first.endswith("ing") or (is_genitive(parts[0]) and words.is_name(parts[0])):
        return title if is_genitive(parts[0]) else None
    if _PERSON_TITLE.match(title):
        return title
    rest_is_lower = len(parts) > 1 and all(part.islower() for part in parts[1:])
    all_capitals = all(part[:1].isupper() for part in parts)
    is_common = (
        rest_is_lower
        or title.islower()
        or bool(_COMMON_END.search(title))
        or parts[-1].lower() in _COMMON
        or (len(parts) == 1 and bool(_PLURAL.search(title)) and title not in words.names)
        or not all(words.is_name(part) for part in parts)
    )
    if len(parts) > 1 and _PREPOSITION.search(title) and not all_capitals and first not in words.lower:
        return None if len(parts) > 4 else f"the {lower_first(title)}"
    if not is_common:
        return title
    lowered = lower_first(title)
    if len(parts) > 1 and all_capitals:
        lowered = " ".join(part if words.is_name(part) else lower_first(part) for part in parts)
    return f"the {lowered}"


def is_english(text: str) -> bool:
    """Whether a text is English, by its function words; a text with few words is, if nothing speaks against it."""
    found = re.findall(r"[^\W\d_]+", text[:20_000].lower())
    if not found:
        return False
    ours, theirs = (sum(word in listed for word in found) for listed in (FUNCTION_WORDS, _FOREIGN))
    latin = sum(word.isascii() for word in found) >= 0.93 * len(found)
    if len(found) < 40 and theirs == 0 and latin:
        return True
    # Notes of fragments have few function words of any language.
    least = 0.1 if theirs else 0.03
    return ours >= least * len(found) and ours > theirs and latin
