"""Facts from English sentences: each part of a statement is asked for."""

import re
from collections.abc import Iterator
from dataclasses import replace

from sebp_edge.questions.chunks import Chunk
from sebp_edge.questions.clauses import Before, Clause, as_third_person, clause_of
from sebp_edge.questions.facts import Core, Fact, lower_first, upper_first
from sebp_edge.questions.notes import Note
from sebp_edge.questions.subjects import FUNCTION_WORDS, is_person_name, is_relation, is_surely_person
from sebp_edge.questions.values import NUMBER, has_date, kind_of
from sebp_edge.questions.verbs import BE, PAST_OF_PARTICIPLE, Verb, known_form, likely_form
from sebp_edge.questions.word_lists import listed

_UNRESOLVED = re.compile(r"\b(?:it|its|they|them|their|he|him|his|she|her|this|that|these|those|here|there|one|ones)\b")
_ADJECTIVE_OF_SIZE = re.compile(
    r"(.+?) (old|long|wide|high|tall|deep|thick|heavy|away|apart|late|early|big|square)(?: .*)?"
)
_COUNT = re.compile(rf"({NUMBER}) ([a-z][a-z ]*)$", re.IGNORECASE)
_SPENDING = frozenset({"pay", "cost", "spend", "owe", "earn", "charge"})
_OF_THINGS = frozenset({"cost", "consist", "contain", "expire", "weigh", "measure", "open", "close", "last"})
_NUMBERED = re.compile(rf"([a-z]+) (\d[\w.-]*|{NUMBER})")
_CODE = re.compile(r"(?=.*\d)[\w+./ -]{4,20}")
_FREQUENT = re.compile(r"(?:every|each|once|twice|daily|weekly|monthly|yearly|\w+ times)\b")


def facts_of_sentences(note: Note) -> Iterator[Fact]:
    if not note.is_english:
        return
    for section in note.sections:
        person, before = None, ""
        for sentence in section.sentences:
            clause = clause_of(sentence, note, Before(person, not before or note.is_on_title(before)))
            before = sentence
            if clause is None:
                continue
            if clause.is_person and not clause.is_pronoun:
                person = clause.subject
            yield from _Asker(clause, note).facts()


class _Asker:
    """Asks for the parts of one statement."""

    def __init__(self, clause: Clause, note: Note):
        self.clause = clause
        self.note = note

    def facts(self) -> Iterator[Fact]:
        clause = self.clause
        if clause.apposition:
            who = (Core(f"Who is {clause.subject}?", f"who {clause.subject} is"),)
            yield self._fact(clause.apposition, who, f"{clause.subject} is ___.", 7)
        if clause.is_copula:
            yield from self._of_copula()
        else:
            for index, chunk in enumerate(clause.chunks):
                yield from self._of_chunk(index, chunk)
            if not clause.is_pronoun:
                yield self._of_subject()
            elif clause.auxiliary == "should" and clause.verb:
                yield from self._of_task()

    def _of_chunk(self, index: int, chunk: Chunk) -> Iterator[Fact]:
        if chunk.kind == "object":
            yield from self._of_object(index, chunk)
            return
        asked, answer, stranded = self._asked(chunk)
        if asked:
            cores = self._cores(asked, index, stranded)
            kept = chunk.text[: len(chunk.text) - len(answer)]
            rank = 9 if chunk.kind in ("time", "price", "duration", "temperature") else 6
            yield self._fact(answer, cores, self._statement(index, f"{kept}___"), rank)
        if chunk.kind == "by" and asked:
            yield from self._active(index, chunk)

    def _asked(self, chunk: Chunk) -> tuple[list[str], str, str]:
        """Returns question words, the answer to them, and a preposition to end the question with."""
        kind, word, content = chunk.kind, chunk.preposition, chunk.content
        is_person = is_person_name(content, self.note.words)
        if kind == "time":
            return self._asked_time(chunk)
        if kind == "duration":
            return ["How long", "For how long"], content, ""
        if kind == "temperature":
            return ["At what temperature", "At how many degrees"], content, ""
        if kind == "price":
            return [f"{upper_first(word)} how much", f"{upper_first(word)} what price"], content, ""
        if kind == "place" and (numbered := _NUMBERED.fullmatch(content)) and (numbered[1] not in FUNCTION_WORDS):
            return (
                [f"{upper_first(word)} which {numbered[1]}", f"{upper_first(word)} what {numbered[1]}"],
                numbered[2],
                "",
            )
        if kind == "place":
            return ["Where", "In which place" if word == "in" else "Where exactly"], chunk.text, ""
        if kind == "reason":
            return ["Why", "For what reason"], content, ""
        if kind == "content" and content.split()[0].lower() in BE:
            return [], "", ""
        if kind == "content":
            return ["What"], content, ""
        if kind in ("with", "from", "to", "for", "by"):
            if kind in ("to", "from") and not is_person:
                return (["Where"], content, kind) if content[:1].isupper() else (["What"], content, kind)
            return (
                ([f"{upper_first(kind)} whom", "Who"] if is_person else [f"{upper_first(kind)} what", "What"]),
                content,
                kind,
            )
        return [], "", ""

    def _asked_time(self, chunk: Chunk) -> tuple[list[str], str, str]:
        word, content, kind = chunk.preposition, chunk.content, kind_of(chunk.content)
        if _FREQUENT.match(chunk.text):
            return ["How often", "When"], chunk.text, ""
        if word in ("since", "until", "till"):
            return [f"{upper_first(word)} when"], content, ""
        if word in ("from", "by"):
            return [f"{upper_first(word)} when"], content, ""
        if word in ("in", "within") and kind == "duration":
            return ["How soon", "Within what time"], chunk.text, ""
        if word in ("before", "after", "during", "when", "while") or not word:
            return ["When", "At what moment" if word in ("when", "while") else "At which time"], chunk.text, ""
        if kind == "year":
            return ["When", "In which year", "In what year"], content, ""
        if kind == "time":
            return ["When", "At what time", "What time"], content, ""
        if word == "on" and has_date(content):
            return (
                ["When", "On which day", "On what date" if any(map(str.isdigit, content)) else "On what day"],
                content,
                "",
            )
        return ["When"], content if has_date(content) else chunk.text, ""

    def _of_object(self, index: int, chunk: Chunk) -> Iterator[Fact]:
        text = chunk.text
        base = self.clause.verb.base if self.clause.verb else None
        kind, count = kind_of(text), _COUNT.fullmatch(text)
        person = is_person_name(text, self.note.words)
        if kind == "money":
            cores = self._cores(["How much money" if base not in _SPENDING else "How much"], index, "")
            if base == "cost":
                subject, be = self.clause.subject, "are" if self.clause.is_plural else "is"
                cores += (
                    Core(f"What {self._do()} {subject} cost?", f"what {subject} {self.clause.main}"),
                    Core(f"What {be} the price of {subject}?", f"what the price of {subject} {be}"),
                )
            yield self._fact(text, cores, self._statement(index, "___"), 9)
        elif kind in ("amount", "duration", "temperature"):
            yield self._fact(
                text,
                self._cores(["How much" if kind == "amount" else "How long"], index, "")
                if base in ("weigh", "take", "last", "use", "need", "measure", "cost")
                else self._cores(["What"], index, ""),
                self._statement(index, "___"),
                8,
            )
        elif count and count[2].split()[-1].endswith("s") and " of " not in text:
            noun = count[2]
            yield self._fact(
                count[1], self._cores([f"How many {noun}"], index, ""), self._statement(index, f"___ {noun}"), 9
            )
        elif self.clause.main in ("called", "named"):
            yield self._fact(text, self._cores(["What"], index, ""), self._statement(index, "___"), 8)
        elif (
            len(text.split()) <= 10
            and not self._is_adverb(text)
            and text.split()[0].lower() not in FUNCTION_WORDS - _NOUN_STARTS
        ):
            yield self._fact(
                text, self._cores(["Who" if person else "What"], index, ""), self._statement(index, "___"), 6
            )

    def _is_adverb(self, text: str) -> bool:
        """Whether a single word after the verb is probably no object."""
        is_single = text.isalpha() and text.islower()
        after_be = self.clause.auxiliary in BE and bool(self.clause.main)
        return is_single and (after_be or len(text) < 4 or text.endswith(("ing", "ed", "ly")))

    def _of_subject(self) -> Fact:
        clause = self.clause
        verb = as_third_person(clause)
        verb = f"{verb} {clause.main}" if clause.auxiliary else verb
        base = clause.verb.base if clause.verb else None
        who = "Who" if clause.is_person and base not in _OF_THINGS else "What"
        rest = " ".join(filter(None, [verb, self._rest(None)]))
        cores = [Core(f"{who} {rest}?", f"{who.lower()} {rest}")]
        if who == "Who":
            cores.append(Core(f"Which person {rest}?", f"which person {rest}"))
        if len(clause.chunks) > 1 and len(clause.chunks[0].text.split()) > 1:
            short = f"{verb} {clause.chunks[0].text}"
            cores.append(Core(f"{who} {short}?", f"{who.lower()} {short}", is_whole=False))
        return self._fact(clause.subject, tuple(cores), self._statement(None, "", subject="___"), 5)

    def _of_task(self) -> Iterator[Fact]:
        """What is to be done at a time."""
        times = [chunk for chunk in self.clause.chunks if chunk.kind == "time"]
        rest = " ".join(chunk.text for chunk in self.clause.chunks if chunk.kind != "time")
        if len(times) == 1 and rest:
            when = times[0].text
            task = f"{self.clause.main} {rest}"
            cores = (
                Core(f"What should I do {when}?", f"what I should do {when}"),
                Core(f"What is planned {when}?", f"what is planned {when}"),
            )
            yield self._fact(upper_first(task), cores, f"I should ___ {when}.", 7)

    def _of_copula(self) -> Iterator[Fact]:
        clause = self.clause
        first, subject, be = clause.chunks[0], clause.subject, clause.auxiliary
        for index, chunk in enumerate(clause.chunks):
            if chunk.kind not in ("object", "other") and clause.subject != "there":
                yield from self._of_chunk(index, chunk)
        if first.kind == "place" and not clause.is_person and not clause.is_pronoun:
            rest = self._rest(None)
            singular = as_third_person(clause)
            core = (Core(f"What {singular} {rest}?", f"what {singular} {rest}"),)
            yield self._fact(subject, core, f"___ {be} {rest}.", 6)
        if first.kind != "object":
            return
        if subject == "there":
            yield from self._of_existence(first.text)
            return
        value, rest = first.text, " ".join(chunk.text for chunk in clause.chunks[1:])
        cores = self._cores_of_value(value)
        if not cores:
            return
        phrase = (
            subject if re.match(r"(?:the|my|our) |\S+['’]s ", subject) and cores[0].direct.startswith("What ") else None
        )
        statement = " ".join(filter(None, [subject, be, "___", rest])) + "."
        rank = 9 if kind_of(value) not in ("text", "name") or any(map(str.isdigit, value)) else 7
        yield self._fact(value, tuple(cores), statement, rank, phrase if not rest else None)
        if not clause.is_pronoun and not rest:
            yield from self._inverse(value)

    def _of_existence(self, what: str) -> Iterator[Fact]:
        """Asks for what "there is" somewhere."""
        clause, rest, count = self.clause, self._rest(0), _COUNT.fullmatch(what)
        if not rest:
            return
        be = as_third_person(clause)
        core = Core(f"What {be} there {rest}?", f"what {be} there {rest}")
        yield self._fact(what, (core, Core(f"What {be} {rest}?", f"what {be} {rest}")), self._statement(0, "___"), 6)
        if count and count[2].split()[-1].endswith("s"):
            yield self._fact(
                count[1], self._cores([f"How many {count[2]}"], 0, ""), f"___ {count[2]} {clause.auxiliary} {rest}.", 9
            )

    def _cores_of_value(self, value: str) -> list[Core]:
        """Asks what a subject is, by the kind of the answer."""
        clause = self.clause
        kind, size = kind_of(value), _ADJECTIVE_OF_SIZE.fullmatch(value)
        words = value.split()
        if size and kind_of(size[1]) in ("amount", "duration", "number"):
            return list(self._cores([f"How {size[2]}"], 0, ""))
        if kind == "money":
            return list(self._cores(["How much", "What"], 0, ""))
        if kind in ("date", "weekday", "time"):
            return list(
                self._cores(["What" if kind == "time" else "When", "Which date" if kind == "date" else "What"], 0, "")
            )
        if kind == "colour" and not re.search(r"colou?r", clause.subject):
            return list(self._cores(["What colour", "Which colour"], 0, ""))
        if clause.is_person and not clause.is_pronoun and words[0].lower() in _NOUN_STARTS:
            who = "Who" if is_relation(value) or is_surely_person(clause.subject) else "Who or what"
            return list(self._cores([who], 0, ""))
        if is_person_name(value, self.note.words):
            is_name = clause.is_person and not is_relation(clause.subject)
            return [] if is_name else list(self._cores(["Who"], 0, ""))
        if clause.is_person and not clause.is_pronoun:
            return [] if len(words) == 1 and words[0].isalpha() else list(self._cores(["What"], 0, ""))
        if len(words) == 1 and words[0].isalpha() and words[0].islower():
            be, subject = clause.auxiliary, clause.subject
            return (
                []
                if clause.is_pronoun or len(clause.chunks) > 1
                else [Core(f"What {be} {subject} like?", f"what {subject} {be} like")]
            )
        if words[0].lower() in ("too", "very", "so", "quite", "really", "almost", "still", "as", "to"):
            return []
        return list(self._cores(["What"], 0, ""))

    def _inverse(self, value: str) -> Iterator[Fact]:
        clause = self.clause
        who = "Who" if clause.is_person else "What"
        be = as_third_person(clause)
        definite = value.split()[0].lower() in ("the", "my", "our")
        if definite or (_CODE.fullmatch(value) and kind_of(value) in ("code", "phone", "number", "email")):
            cores = [Core(f"{who} {be} {value}?", f"{who.lower()} {value} {be}")]
            yield self._fact(clause.subject, tuple(cores), f"___ {be} {value}.", 6)

    def _active(self, index: int, chunk: Chunk) -> Iterator[Fact]:
        """Asks for who did something that is said in the passive."""
        clause = self.clause
        words = clause.main.split()
        if clause.auxiliary not in ("was", "were") or len(words) != 1:
            return
        past = PAST_OF_PARTICIPLE.get(words[0], words[0])
        rest = " ".join(filter(None, [past, clause.subject, self._rest(index)]))
        who = "Who" if is_person_name(chunk.content, self.note.words) else "What"
        cores = (Core(f"{who} {rest}?", f"{who.lower()} {rest}"),)
        yield self._fact(chunk.content, cores, f"___ {rest}.", 7)

    def _cores(self, asked: list[str], index: int, stranded: str) -> tuple[Core, ...]:
        cores = []
        for question in asked:
            end = "" if question.split()[0].lower() == stranded else stranded
            cores.append(self._core(question, " ".join(filter(None, [self._rest(index), end]))))
        short = self._short_rest(index)
        if short and short != self._rest(index):
            end = "" if asked[0].split()[0].lower() == stranded else stranded
            cores.append(replace(self._core(asked[0], " ".join(filter(None, [short, end]))), is_whole=False))
        return tuple(dict.fromkeys(cores))

    def _short_rest(self, index: int) -> str:
        """Returns what follows the verb as far as its object, if that is not what is asked for."""
        chunks = self.clause.chunks
        last = next((number for number, chunk in enumerate(chunks) if chunk.kind == "object"), index)
        return " ".join(chunk.text for chunk in chunks[: last + 1]) if last < index else ""

    def _core(self, asked: str, rest: str) -> Core:
        clause = self.clause
        if clause.auxiliary:
            parts = [asked, clause.auxiliary, clause.subject, clause.main, rest]
            told = [lower_first(asked), clause.subject, clause.auxiliary, clause.main, rest]
            if clause.is_copula:
                told = [lower_first(asked), clause.subject, clause.auxiliary, rest]
        else:
            told = [lower_first(asked), clause.subject, clause.main, rest]
            if clause.verb.base:
                parts = [asked, self._do(), clause.subject, self._plain_main(), rest]
            else:
                parts = [asked, "was it that" if clause.verb.tense == "past" else "is it that", *told[1:]]
        return Core(" ".join(filter(None, parts)) + "?", " ".join(filter(None, told)))

    def _do(self) -> str:
        return {"past": "did", "third": "does", "plain": "do"}[self.clause.verb.tense]

    def _plain_main(self) -> str:
        """Returns the verb for after "do", with its adverbs and its particle."""
        verb = self.clause.verb
        return " ".join(verb.base if _is_form(word, verb) else word for word in self.clause.main.split())

    def _rest(self, index: int | None) -> str:
        """Returns what follows the verb, without one chunk; reasons do not help to tell a fact from others."""
        chunks = self.clause.chunks
        return " ".join(
            chunk.text
            for number, chunk in enumerate(chunks)
            if number != index and (chunk.kind != "reason" or len(chunks) == 1)
        )

    def _statement(self, index: int | None, gap: str, subject: str | None = None) -> str:
        clause = self.clause
        chunks = [gap if number == index else chunk.text for number, chunk in enumerate(clause.chunks)]
        return " ".join(filter(None, [subject or clause.subject, clause.auxiliary, clause.main, *chunks])) + "."

    def _fact(self, answer: str, cores: tuple[Core, ...], cloze: str, rank: int, phrase: str | None = None) -> Fact:
        cores = tuple(cores)
        topic = self.note.subject.topic if self._needs_topic(cores[0].direct) else None
        keywords = " ".join(word for word in cores[0].indirect.split() if word.lower() not in _LEFT_OUT)
        return Fact(answer, cores, keywords, phrase, cloze, topic, rank)

    def _needs_topic(self, question: str) -> bool:
        """Whether a question does not say by itself which note it is about."""
        words = re.findall(r"[\w'’-]+", question)
        title = {word.lower() for word in re.findall(r"\w+", self.note.subject.title)} - FUNCTION_WORDS
        if _UNRESOLVED.search(question):
            return True
        named = any(word[0].isupper() and word != "I" and not has_date(word) for word in words[1:])
        return not named and not title & {word.lower() for word in words}


_NOUN_STARTS = listed(
    """
    the a an my our your his her its their all every each some one no any
    """
)
_LEFT_OUT = listed(
    """
    the a an is are was were my our that of
    """
)


def _is_form(word: str, verb: Verb) -> bool:
    found = known_form(word, plain=True) or likely_form(word)
    return found is not None and found.base == verb.base
