"""The forms of English verbs, as far as questions need them."""

from dataclasses import dataclass

from sebp_edge.questions.word_lists import has_plural_s, listed

BE = frozenset({"is", "are", "was", "were", "am"})
AUXILIARIES = BE | {
    "will",
    "would",
    "can",
    "could",
    "must",
    "should",
    "may",
    "might",
    "shall",
}
HAVE = frozenset({"has", "have", "had"})

# Base form, past tense, past participle.
_IRREGULAR = """
be was been, become became become, begin began begun, bind bound bound, bend bent bent, bite bit bitten, blow blew
blown, break broke broken, beat beat beaten, bring brought brought, build built built, burn burnt burnt, buy bought
bought, catch caught caught, choose chose chosen, come came come, cost cost cost, cut cut cut, deal dealt dealt, dig
dug dug, do did done, draw drew drawn, dream dreamt dreamt, drink drank drunk, drive drove driven, eat ate eaten,
fall fell fallen, feed fed fed, feel felt felt, find found found, fit fitted fitted, fly flew flown, forget forgot
forgotten, freeze froze frozen, get got got, give gave given, go went gone, grind ground ground, grow grew grown,
hang hung hung, have had had, hear heard heard, hide hid hidden, hit hit hit, hold held held, hurt hurt hurt, keep
kept kept, know knew known, lay laid laid, lead led led, learn learnt learnt, leave left left, lend lent lent, let
let let, lie lay lain, light lit lit, lose lost lost, make made made, mean meant meant, meet met met, pay paid paid,
put put put, read read read, ride rode ridden, ring rang rung, rise rose risen, run ran run, say said said, see saw
seen, sell sold sold, send sent sent, set set set, sew sewed sewn, shake shook shaken, shine shone shone, shoot shot
shot, show showed shown, shut shut shut, sing sang sung, sink sank sunk, sit sat sat, sleep slept slept, sow sowed
sown, speak spoke spoken, spend spent spent, split split split, spread spread spread, stand stood stood, steal stole
stolen, stick stuck stuck, sweep swept swept, swell swelled swollen, swim swam swum, take took taken, teach taught
taught, tear tore torn, tell told told, think thought thought, throw threw thrown, understand understood understood,
wake woke woken, wear wore worn, win won won, wind wound wound, write wrote written
"""
_REGULAR = sorted(
    listed(
        """
    accept add adjust admire agree allow announce answer apply approve argue arrange arrive ask assign attach attend
    bake belong bleed boil book borrow bottle brush calibrate call cancel care carry celebrate change charge check
    chop clean clear climb close collect combine complain complete confirm connect consist contact contain continue
    cook cool copy count cover crack cross cycle damage decide decline deliver depart deploy describe design develop
    die drain dry employ empty enjoy enter estimate examine expect expire explain fail fasten fetch file fill filter
    finish fix flower fold follow fry gather happen harvest heat help hire hope host improve include increase
    inspect install invite join jump kick kiss knead knock label land last launch like line list live load lock look
    love maintain manage mark marry measure mend mention migrate miss mix mount move mow need notice observe offer
    open order organise organize own pack paint park pass peel pick place plan plant play post pour practise prefer
    prepare prescribe press prevent print produce promise propose prune publish pull pump push queue rain raise
    reach receive recommend record reduce refill refuse reject release remain remember remind remove rent repair
    repeat replace reply report repot request rescue reserve return review rinse roast roll sail save schedule screw
    season seem serve service settle share shop sign simmer smell smoke soak sort sound spill spray start stay stir
    stock stop store stretch study suffer suggest supply support suspect switch talk taste test thank tie tighten
    touch train transfer travel treat trim try tune turn type unlock update upgrade use visit vote wait walk want
    aim appear avoid bark bloom brew carve cough dance end escape exist face fade float flood glue grill guard hatch
    hunt iron knit lack lick melt nail name owe phone polish process promote protect rake rub scan scrub seal ship
    shovel skip slice slip sneeze solve sprout stain steam stitch strain swap swarm tap toast trade translate trust
    tutor unpack vacuum whistle yield germinate graze ripen
    wash watch water weed weigh welcome whisk wipe work worry wrap
    """
    )
)
# Letters that are doubled after a short vowel, "stopped".
_DOUBLED = "bdgmnprt"


@dataclass(frozen=True, slots=True)
class Verb:
    """A finite form.

    Attributes:
        base: None if it is not certain.
        tense: "past", "third" (person) or "plain".
    """

    base: str | None
    tense: str


def third_person(base: str) -> str:
    if base in ("be", "have", "do", "go"):
        return {"be": "is", "have": "has", "do": "does", "go": "goes"}[base]
    if base.endswith(("s", "sh", "ch", "x", "z", "o")):
        return base + "es"
    if base.endswith("y") and base[-2:-1] not in "aeiou":
        return base[:-1] + "ies"
    return base + "s"


def _past(base: str) -> list[str]:
    if base.endswith("e"):
        return [base + "d"]
    if base.endswith("y") and base[-2:-1] not in "aeiou":
        return [base[:-1] + "ied"]
    short = len(base) >= 3 and base[-1] in _DOUBLED + "l" and base[-2] in "aeiou" and base[-3] not in "aeiou"
    return [base + "ed", base + base[-1] + "ed"] if short else [base + "ed"]


_TRIPLES = [tuple(entry.split()) for entry in _IRREGULAR.replace("\n", " ").split(",")]
BASES = frozenset({base for base, _, _ in _TRIPLES} | set(_REGULAR)) - {"be"}
PAST = {past: base for base, past, _ in _TRIPLES if base != "be"} | {
    past: base for base in _REGULAR for past in _past(base)
}
THIRD = {third_person(base): base for base in BASES}
# Past tense by participle, to turn the passive round.
PAST_OF_PARTICIPLE = {participle: past for _, past, participle in _TRIPLES if participle != "been"}
PARTICIPLES = frozenset(PAST_OF_PARTICIPLE) | frozenset(PAST)
_SAME = frozenset(PAST) & BASES  # cost, cut, put, ...


def known_form(word: str, *, plain: bool) -> Verb | None:
    """Returns the verb that a word is a form of; base forms only with `plain`."""
    if word in _SAME:
        return Verb(word, "plain" if plain else "past")
    if word in PAST:
        return Verb(PAST[word], "past")
    if word in THIRD:
        return Verb(THIRD[word], "third")
    return Verb(word, "plain") if plain and word in BASES else None


def likely_form(word: str) -> Verb | None:
    """Returns the verb of a word that stands where a verb is expected, after a name."""
    if not word.isalpha() or not word.islower() or len(word) < 5:
        return None
    if word.endswith("ed") and not word.endswith("eed"):
        return Verb(None, "past")
    if has_plural_s(word) and not word.endswith("ways"):
        if word.endswith("ies"):
            return Verb(word[:-3] + "y", "third")
        return Verb(word[:-2] if word.endswith(("shes", "ches", "sses", "xes", "zzes")) else word[:-1], "third")
    return None


def is_participle(word: str) -> bool:
    return word in PARTICIPLES or (len(word) > 4 and word.endswith("ed") and not word.endswith("eed"))
