"""Facts from lines of "Key: value", from lists, from items with a bold beginning, and from tables."""

import re
from collections.abc import Iterator

from sebp_edge.questions.facts import Core, Fact, genitive, lower_first
from sebp_edge.questions.notes import Note, Pair, Section
from sebp_edge.questions.question import MAX_ANSWER_WORDS
from sebp_edge.questions.subjects import DETERMINERS, Subject, is_person_name, is_surely_person, subject_of
from sebp_edge.questions.values import has_date, kind_of
from sebp_edge.questions.verbs import BASES, PAST, THIRD, is_participle
from sebp_edge.questions.word_lists import has_plural_s, is_genitive, listed

# Items of a list that are asked for together.
MAX_ITEMS = 8

# Last words of keys that name an attribute of what the note is about.
_ATTRIBUTES = listed(
    """
    account address age alarm amount appointment arrival author balance birthday birthplace blood bottle box brand
    breed budget build button cable capacity captain chair charge city client code codes colour color combination
    company contact contract cost costs country currency customer cycle date day deadline density departure deposit
    depth destination device diet diagnosis dimensions director distance doctor dosage dose due duration editor
    email e-mail engine expiry extension fee file filter flight floor food frequency fuel gate gauge guest height
    home host hotel hours id insurance interval invoice isbn item job key language leader length level licence
    license limit lines location lock login manager manufacturer material meeting method mileage mobile model name
    neighbour network note nickname number oil opening order origin owner page pages part partner password payment
    period person pet phone pin place plan plate plumber policy port position postcode pressure price printer
    priority problem producer project publisher purpose rate rating reason receipt recipe reference rent result role
    room route router rule rules schedule score seat season serial service servings setting shape shop size source
    spacing species speed ssid start station status store street supplier surname system task team telephone
    temperature term terminal threshold time times title tool topic total train treatment type unit url user
    username value variety vehicle vendor version vessel vet warranty website weight width wifi wi-fi wind winner
    work year yield zip verdict opinion question symptoms allergies allergy ingredients participants members
    attendees guests decision decisions goal goals medication medicine therapist dentist nurse teacher school class
    landlord tenant electrician emergency weather found checkout check-in check-out checkin hosts driver sponsor
    birthdate iban bic bank
    """
) - {"found"}
_PERSON_ROLES = listed(
    """
    author captain chair client contact customer director doctor editor guest host leader manager manufacturer
    neighbour owner partner person plumber publisher supplier vet winner therapist dentist nurse teacher landlord
    tenant electrician driver producer
    """
)
_PLACES = listed(
    """
    in on under behind near above below beside between inside next at
    """
)
_PHONE = re.compile(r"(?:\+|\b0)\d[\d ()/-]{5,18}\d")
# Keys that are rather the beginning of a sentence.
_SENTENCE_KEY = re.compile(r"(?:next|last|this) time$|(?:what|how|why|when|where|who) ", re.IGNORECASE)
_PLURAL_OF = re.compile(r"(?<![su])s$")
_GENERIC_HEADINGS = listed(
    """
    details notes note info information overview contact contacts data general summary misc other facts basics about
    description background history links references to-do todo tasks
    """
)


def facts_of_structures(note: Note) -> Iterator[Fact]:
    for section in note.sections:
        where = _InSection(note, section)
        for pair in section.pairs:
            yield from _pair_facts(pair, where)
        for head, rest in section.entries:
            yield from _entry_facts(head, rest, where)
        for introduction, items in section.lists:
            yield from _list_facts(introduction, items, where)
        for table in section.tables:
            yield from _table_facts(table, where)


class _InSection:
    """Names the section of a note in questions."""

    def __init__(self, note: Note, section: Section):
        self.note = note
        self.section = section
        heading = section.heading if section.heading.lower() not in _GENERIC_HEADINGS else ""
        self.within = subject_of(heading, note.words, is_english=note.is_english) if heading else Subject("")

    @property
    def subject(self) -> Subject:
        """What the section's lines are about: what its heading names, or else the note's title."""
        return self.within if self.within.title else self.note.subject

    @property
    def topic(self) -> str | None:
        """What has to be said first, if the subject is that of the section."""
        return self.note.subject.topic if self.within.title else None

    @property
    def is_collection(self) -> bool:
        """Whether the title names many things, so that a line's key belongs to none of them."""
        return self.subject.title.lower() in _GENERIC_HEADINGS | {"people", "people and places", "addresses"}

    @property
    def path(self) -> str:
        """The title and the heading in the note's own words."""
        return ", ".join(filter(None, (self.note.subject.title, self.within.title)))


def _pair_facts(pair: Pair, where: _InSection) -> Iterator[Fact]:
    value = short_value(pair.value)
    if not value or not where.path:
        return
    if not where.note.is_english:
        yield Fact(value, keywords=f"{where.path}: {pair.key}", rank=8)
        return
    words = pair.key.lower().split()
    is_dated = kind_of(value) in ("date", "year")
    if _SENTENCE_KEY.match(pair.key):
        yield _written_under(pair.key, value, where)
    elif is_participle(words[-1]) and (len(words) > 1 or is_dated):
        yield _happened(pair.key, value, where)
    elif _is_attribute(pair, value) and where.subject.topic and not where.is_collection:
        yield attribute(_lowered(pair.key, where), value, where.subject, where.topic)
    elif (pair.in_list or where.is_collection) and not _is_verb(words[0]):
        yield _entry(pair.key, value, where)
    else:
        yield _written_under(pair.key, value, where)


def _is_attribute(pair: Pair, value: str) -> bool:
    words = pair.key.lower().split()
    is_known = words[-1] in _ATTRIBUTES or _PLURAL_OF.sub("", words[-1]) in _ATTRIBUTES
    return (is_known or _is_measured(pair, value)) and not _is_verb(words[0])


def _is_measured(pair: Pair, value: str) -> bool:
    """Whether a line says when something is, or how much, such as "Last oil change"."""
    return not pair.in_list and kind_of(value) in ("date", "money", "phone", "email") and len(pair.key.split()) <= 4


def short_value(value: str) -> str:
    """Returns a value, or its beginning, if that is short enough for an answer; otherwise an empty text."""
    value = value.strip().rstrip(".,;")
    first = value.split(", ")[0]
    if kind_of(first) in ("number", "date", "money", "time", "phone", "email"):
        return first
    for cut in (r"$", r"(?<=[a-z)])\. ", r"; ", r" [–—-] ", r" \(", r", "):
        part = re.split(cut, value)[0].strip() if cut != "$" else value
        if len(part.split()) <= MAX_ANSWER_WORDS and len(part) <= 100:
            return part
    return ""


def _is_verb(word: str) -> bool:
    low = word.lower()
    return low in THIRD or (low in PAST and low not in BASES) or low in ("do", "did", "took", "call", "ask", "remember")


def _lowered(key: str, where: _InSection, *, may_be_name: bool = False) -> str:
    """Returns a key as it stands within a sentence; one that `may_be_name` keeps its capital if it is unknown."""
    first, _, rest = key.partition(" ")
    words = where.note.words
    is_name = first in words.names or (is_genitive(first) and words.is_name(first))
    if may_be_name and words.is_name(first) and (not rest or rest.split()[0] in _PLACES):
        is_name = True
    return key if is_name else lower_first(key)


def attribute(key: str, value: str, subject: Subject, topic: str | None, rank: int = 10) -> Fact:
    """Returns the fact that an attribute of a subject has a value."""
    last = key.split()[-1].lower()
    be = "are" if has_plural_s(last) else "is"
    kind = kind_of(value)
    if kind in ("phone", "email") and last in ("phone", "mobile", "telephone", "email", "e-mail"):
        key = f"{key} {'number' if kind == 'phone' else 'address'}"
    if subject.phrase is None:
        named = f"the {key} in the note {subject.topic}"
        phrases = [named, f"the {key} in my note {subject.topic}"]
    elif (is_surely_person(subject.phrase) or subject.phrase.split()[0] in ("my", "our")) and not re.search(
        r"['’]s ", subject.phrase
    ):
        phrases = [f"{genitive(subject.phrase)} {key}", f"the {key} of {subject.phrase}"]
    else:
        phrases = [f"the {key} of {subject.phrase}", f"the {key} for {subject.phrase}"]
    if key.split()[0] in DETERMINERS or is_genitive(key.split()[0]):
        phrases = [f"{key} of {subject.topic}", f"{key} for {subject.topic}"]
    elif last == "date" and " " not in key and not subject.is_person:
        phrases = [f"the date of my note on {subject.topic}", f"the date in my note on {subject.topic}"]
    cores = [Core(f"What {be} {phrase}?", f"what {phrase} {be}") for phrase in phrases]
    if last in _PERSON_ROLES and kind == "name":
        cores = [Core(f"Who {be} {phrase}?", f"who {phrase} {be}") for phrase in phrases] + cores[:1]
    elif value.split()[0].lower() in _PLACES:
        cores[:0] = [Core(f"Where {be} {phrases[-1]}?", f"where {phrases[-1]} {be}")]
    elif kind in ("date", "weekday") and last not in ("date", "day", "time"):
        happened = {"is": "was", "are": "were"}[be] if key.split()[0].lower() in ("last", "first", "previous") else be
        cores[:1] = [Core(f"When {happened} {phrase}?", f"when {phrase} {happened}") for phrase in phrases]
        cores.append(Core(f"Which date is noted for {phrases[0]}?", f"which date is noted for {phrases[0]}"))
    elif kind == "time" and last not in ("time", "hours"):
        cores[:1] = [Core(f"What time {be} {phrase}?", f"what time {phrase} {be}") for phrase in phrases]
    elif kind == "money":
        cores.append(Core(f"How much {be} {phrases[0]}?", f"how much {phrases[0]} {be}"))
    elif last in ("phone", "telephone", "mobile") or key.endswith("phone number"):
        of = subject.phrase or f"the note {subject.topic}"
        cores.append(Core(f"Which number do I call for {of}?", f"which number I call for {of}"))
    cores.append(Core(f"Which {key} is noted for {subject.topic}?", f"which {key} is noted for {subject.topic}"))
    cloze = f"{phrases[0]} {be} ___."
    return Fact(value, tuple(cores), f"{subject.bare} {key}", phrases[-1], cloze, topic, rank)


def _happened(key: str, value: str, where: _InSection) -> Fact:
    """A key such as "Last serviced"."""
    subject, original = where.subject, key
    key = lower_first(key)
    if subject.phrase and has_date(value):
        adverb = " ".join(key.split()[:-1])
        be = "were" if _is_plural_phrase(subject.phrase) else "was"
        what = f"{subject.phrase} {be} {key}"
        if adverb in ("", "last", "first", "next", "date", "originally"):
            cores = (
                Core(f"When {be} {subject.phrase} {key}?", f"when {what}"),
                Core(f"On which date {be} {subject.phrase} {key}?", f"on which date {what}"),
                Core(f"What is the date on which {what}?", f"the date on which {what}"),
            )
            return Fact(value, cores, f"{subject.bare} {key}", None, f"{what} on ___.", where.topic, 10)
    return _written_under(original, value, where)


def _is_plural_phrase(phrase: str) -> bool:
    last = phrase.split()[-1].lower()
    return has_plural_s(last) and not is_genitive(last) and phrase[0].islower()


def _entry(key: str, value: str, where: _InSection, rank: int = 7) -> Fact:
    """An item "name: what is noted for it" of a list."""
    key = key if is_person_name(key, where.note.words) else _lowered(key, where)
    subject = where.note.subject if where.note.subject.topic else where.subject
    at = f" in my notes on {subject.topic}" if subject.topic else " in my notes"
    cores = [
        Core(f"What is noted for {key}{at}?", f"what is noted for {key}{at}"),
        Core(f"What did I write down for {key}{at}?", f"what I wrote down for {key}{at}"),
        Core(f"What does it say about {key}{at}?", f"what it says about {key}{at}"),
    ]
    kind = kind_of(value)
    asked = {
        "date": "Which date",
        "time": "What time",
        "money": "What price",
        "phone": "Which phone number",
        "email": "Which email address",
        "amount": "Which amount",
        "duration": "How much time",
        "temperature": "What temperature",
        "weekday": "Which day",
    }.get(kind)
    if asked:
        cores.insert(1, Core(f"{asked} is noted for {key}{at}?", f"{lower_first(asked)} is noted for {key}{at}"))
    if kind == "name" and is_person_name(value, where.note.words) and where.within.phrase:
        cores.append(Core(f"Who is noted for {key}{at}?", f"who is noted for {key}{at}"))
    keywords = f"{subject.bare} {key}".strip()
    return Fact(value, tuple(cores), keywords, f"what is noted for {key}{at}", f"{key}: ___", None, rank)


def _written_under(key: str, value: str, where: _InSection) -> Fact:
    subject = where.note.subject if where.note.subject.topic else where.subject
    at = f" in my notes on {subject.topic}"
    cores = (
        Core(f'What is written under "{key}"{at}?', f'what is written under "{key}"{at}'),
        Core(f'What does "{key}" say{at}?', f'what "{key}" says{at}'),
        Core(f'What did I write after "{key}"{at}?', f'what I wrote after "{key}"{at}'),
        Core(f'What comes after "{key}:"{at}?', f'what comes after "{key}:"{at}'),
    )
    cloze = f'my notes on {subject.topic} say "{key}: ___".'
    phrase = f'the line "{key}" of my notes on {subject.topic}'
    return Fact(value, cores, f"{subject.bare} {lower_first(key)}", phrase, cloze, None, 6)


def _entry_facts(head: str, rest: str, where: _InSection) -> Iterator[Fact]:
    """An item such as "**Skruv**, grey cat, seven years old."."""
    value = short_value(re.sub(r"^[\s:,–—-]+", "", rest))
    value = re.split(r"(?<=[a-z])\. ", value)[0]
    phone = _PHONE.search(rest)
    if phone and where.note.is_english:
        person = Subject(head, head, is_person=True)
        yield attribute("phone number", phone[0], person, where.note.subject.topic, rank=9)
        value = value.replace(phone[0], "").strip(" ,")
    parts = value.split(", ")
    value = ", ".join(part for part in parts if part.split() and part.split()[0].lower() not in {*THIRD, "and"})
    if not value or not where.path or value.split()[0].lower() in THIRD:
        return
    if not where.note.is_english:
        yield Fact(value, keywords=f"{where.path}: {head}", rank=7)
        return
    head = head if is_person_name(head, where.note.words) else _lowered(head, where, may_be_name=True)
    who = "Who or what" if head[:1].isupper() else "What"
    cores = (
        Core(f"{who} is {head}?", f"{lower_first(who)} {head} is"),
        Core(f"What do my notes say about {head}?", f"what my notes say about {head}"),
        Core(f"How do my notes describe {head}?", f"how my notes describe {head}"),
        Core(f"What is noted about {head}?", f"what is noted about {head}"),
    )
    yield Fact(value, cores, head, None, f"{head}: ___", where.note.subject.topic, 7)


def _list_facts(introduction: str, items: list[str], where: _InSection) -> Iterator[Fact]:
    """A list of short items: all of them, if they are few, and its first and last."""
    name = introduction or where.within.title or where.note.subject.title
    if not name or len(items) < 2:
        return
    few = items[:MAX_ITEMS]
    answer = ", ".join(few)
    if not where.note.is_english:
        if len(items) <= MAX_ITEMS and len(answer.split()) <= MAX_ANSWER_WORDS:
            path = ", ".join(filter(None, (where.path, introduction)))
            yield Fact(answer, keywords=path, rank=5)
        return
    subject = where.note.subject
    is_list = name.lower().endswith(" list") and re.fullmatch(r"[\w' -]+", name)
    named = f"the {_lowered(name, where)}" if is_list else f'the list "{name}"'
    label = f"{named} in my notes on {subject.topic}" if subject.topic and subject.title != name else named
    cores = (
        Core(f"What is on {label}?", f"what is on {label}"),
        Core(f"Which items are on {label}?", f"which items are on {label}"),
        Core(f"What did I put on {label}?", f"what I put on {label}"),
    )
    phrase = f"all items of {label}"
    if len(items) <= MAX_ITEMS and len(answer.split()) <= MAX_ANSWER_WORDS:
        yield Fact(answer, cores, f"list {lower_first(name)}", phrase, None, None, 5)
    for place, item in (("first", items[0]), ("last", items[-1])):
        if len(item.split()) <= MAX_ANSWER_WORDS:
            yield _place_fact(place, item, label, name)


def _place_fact(place: str, item: str, label: str, name: str) -> Fact:
    cores = (
        Core(f"What is the {place} item on {label}?", f"what the {place} item on {label} is"),
        Core(f"Which item comes {place} on {label}?", f"which item comes {place} on {label}"),
        Core(f"What is listed {place} on {label}?", f"what is listed {place} on {label}"),
    )
    cloze = f"The {place} item on {label} is ___."
    phrase = f"the {place} item on {label}"
    return Fact(item, cores, f"{place} item list {lower_first(name)}", phrase, cloze, None, 4)


def _table_facts(table: list[list[str]], where: _InSection) -> Iterator[Fact]:
    header = table[0]
    for row in table[1:]:
        if not row[0] or not re.search(r"\w", row[0]):
            continue
        for column, value in list(zip(header, row, strict=False))[1:]:
            if re.search(r"\w", value) and re.search(r"\w", column) and len(value.split()) <= MAX_ANSWER_WORDS:
                yield _cell_fact(row[0], column, value, where)
    if where.note.is_english:
        yield from _row_facts(table, where)


def _cell_fact(label: str, column: str, value: str, where: _InSection) -> Fact:
    if not where.note.is_english:
        return Fact(value, keywords=", ".join(filter(None, (where.path, label, column))), rank=8)
    last = column.split()[-1].lower()
    if last in _ATTRIBUTES or _PLURAL_OF.sub("", last) in _ATTRIBUTES:
        return attribute(_lowered(column, where), value, Subject(label, label), where.subject.topic, rank=8)
    cores = (
        Core(f'What is noted under "{column}" for {label}?', f'what is noted under "{column}" for {label}'),
        Core(f'What does "{column}" say for {label}?', f'what "{column}" says for {label}'),
        Core(f'For {label}, what is in the column "{column}"?', f'what is in the column "{column}" for {label}'),
    )
    cloze = f"{label}, {column}: ___"
    return Fact(value, cores, f"{label} {lower_first(column)}", None, cloze, where.subject.topic, 8)


def _row_facts(table: list[list[str]], where: _InSection) -> Iterator[Fact]:
    """Asks for the row that a value stands in, where only one has it."""
    header = table[0]
    kind = lower_first(header[0]) if re.fullmatch(r"[\w -]+", header[0]) else "row"
    for number, column in enumerate(header[1:], start=1):
        values = [row[number] if number < len(row) else "" for row in table[1:]]
        for row, value in zip(table[1:], values, strict=True):
            if not re.search(r"\w", value) or values.count(value) > 1 or not row[0] or not column:
                continue
            has = f'has "{value}" under "{column}"'
            cores = (
                Core(f"Which {kind} {has}?", f"which {kind} {has}"),
                Core(f'For which {kind} is "{column}" {value}?', f'for which {kind} "{column}" is {value}'),
            )
            cloze = f'The {kind} with "{value}" under "{column}" is ___.'
            yield Fact(row[0], cores, f"{kind} {lower_first(column)} {value}", None, cloze, where.subject.topic, 5)
