"""Lets a model write questions about documents that it reads, and keeps those that it then answers as it wrote.

The model writes questions with answers in the document's words, and words each question in other ways. With the
document in its prompt it must give that answer again, whichever way it is asked.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sebp_edge.errors import TextsError
from sebp_edge.questions.answers import is_right
from sebp_edge.questions.asking import prompt_for
from sebp_edge.questions.question import MAX_ANSWER_WORDS, Question

# Answers prompts with at most so many new tokens each.
Answer = Callable[[list[list[int]], int], list[str]]

# Room for a list of questions, for other wordings of one, and for a reply.
LIST_TOKENS = 256
WORDINGS_TOKENS = 128
REPLY_TOKENS = 32
MAX_ANSWER_CHARACTERS = 80
MAX_QUESTION_CHARACTERS = 200
# The largest part of a document that is asked about at once, in tokens: a longer prompt is read less well.
PART_TOKENS = 512

_EXAMPLE = (
    "# Choir trip\n\nThe bus leaves on 3 July from the old mill. A ticket is €24. Bring warm socks, Ottilie says, "
    "since the church is cold."
)
# Each asks for a list, with the list that the example gets.
_LISTS = (
    (
        "Write questions about this text, in its language, one on each line. After each question write its answer, in "
        "the words of the text.",
        "When does the bus of the choir trip leave? 3 July\nWhat does a ticket for the choir trip cost? €24\n"
        "Where does the bus of the choir trip leave from? the old mill",
    ),
    (
        "Write questions about the details of this text, in its language, one on each line. After each question write "
        "its answer, in the words of the text.",
        "Who says that we should bring warm socks to the choir trip? Ottilie\n"
        "Why are warm socks needed on the choir trip? the church is cold\nWhat should be brought to the choir trip? "
        "warm socks",
    ),
)
_REWORD = "Ask this in four other ways, in the same language, one on each line: {}"
_REWORDED = (
    "When does the bus of the choir trip leave?",
    "On which day is the departure of the choir's bus?\nThe choir trip: what is the date on which the bus leaves?\n"
    "When do we set off for the choir trip?\nBus of the choir trip, when?",
)
_NUMBERING = re.compile(r"^\s*(?:[-*•]|\(?\d{1,2}[.):])?\s*")
_WITH_ANSWER = re.compile(r"(?P<question>[^?？]+[?？])[\s:|–—-]*(?P<answer>.*\S)")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Interviewed:
    """What a model wrote about one document.

    Attributes:
        questions: those that it answered as it wrote, and that it does not know without the document.
        known: those that it knows without the document.
        num_written: all that it wrote.
    """

    questions: tuple[Question, ...]
    known: tuple[Question, ...]
    num_written: int


@dataclass(frozen=True)
class _Written:
    part: str
    answer: str
    wordings: tuple[str, ...]


@dataclass(frozen=True)
class Interview:
    """Asks one model.

    Attributes:
        tokenizer: the model's tokenizer. Without a chat template, the model is asked in a plain format.
        answer: answers prompts, the likeliest token each time.
        longest: the most tokens of a prompt and its reply.
    """

    tokenizer: object
    answer: Answer
    longest: int

    def about(self, documents: Sequence[str]) -> list[Interviewed]:
        """Returns what the model wrote about each document; paragraphs too long for a prompt are left out."""
        parts = [(number, part) for number, text in enumerate(documents) for part in self._parts(text)]
        written = [(number, each) for (number, _), own in zip(parts, self._write(parts), strict=True) for each in own]
        checked = self._keep_confirmed([each for _, each in written])
        new, known, num_written = defaultdict(list), defaultdict(list), Counter()
        for (number, _), question, is_known in zip(written, checked, self._are_known(checked), strict=True):
            num_written[number] += 1
            if question is not None:
                (known if is_known else new)[number].append(question)
        return [
            Interviewed(tuple(new[number]), tuple(known[number]), num_written[number])
            for number in range(len(documents))
        ]

    def _parts(self, text: str) -> Iterator[str]:
        """Yields paragraphs together, as many as fit into a prompt."""
        room = min(PART_TOKENS, self.longest - LIST_TOKENS - len(self._prompt(_LISTS[0][0], "", _before(0)) or ()))
        part, used = [], 0
        for paragraph in re.split(r"\n\s*\n", text):
            size = len(self.tokenizer(paragraph, add_special_tokens=False, verbose=False)["input_ids"]) + 2
            if part and used + size > room:
                yield "\n\n".join(part)
                part, used = [], 0
            if paragraph.strip() and size <= room:
                part.append(paragraph.strip("\n"))
                used += size
        if part:
            yield "\n\n".join(part)

    def _write(self, parts: list[tuple[int, str]]) -> list[list[_Written]]:
        """Returns the questions about each part, in several wordings."""
        asked = [(part, at) for _, part in parts for at in range(len(_LISTS))]
        replies = self._replies([self._prompt(_LISTS[at][0], part, _before(at)) for part, at in asked], LIST_TOKENS)
        pairs = {}
        for number, ((part, _), reply) in enumerate(zip(asked, replies, strict=True)):
            for question, answer in _pairs(reply, part):
                pairs.setdefault((number // len(_LISTS), question), answer)
        before = [(_REWORD.format(_REWORDED[0]), _REWORDED[1])]
        rewordings = self._replies(
            [self._prompt(_REWORD.format(question), None, before) for _, question in pairs], WORDINGS_TOKENS
        )
        written = [[] for _ in parts]
        for ((part, question), answer), reply in zip(pairs.items(), rewordings, strict=True):
            wordings = tuple(dict.fromkeys([question, *_wordings(reply, answer)]))
            written[part].append(_Written(parts[part][1], answer, wordings))
        return written

    def _keep_confirmed(self, written: list[_Written]) -> list[Question | None]:
        """Returns each as a question in the wordings that the model answers as it wrote; None if it answers none."""
        asked = [(at, wording) for at, each in enumerate(written) for wording in each.wordings]
        replies = self._replies([self._prompt(wording, written[at].part) for at, wording in asked], REPLY_TOKENS)
        confirmed = [[] for _ in written]
        for (at, wording), reply in zip(asked, replies, strict=True):
            if is_right(reply, written[at].answer):
                confirmed[at].append(wording)
        return [_question(wordings, each.answer) for wordings, each in zip(confirmed, written, strict=True)]

    def _are_known(self, questions: list[Question | None]) -> list[bool]:
        """Whether the model gives each answer without the document, in any wording."""
        asked = [
            (at, wording)
            for at, question in enumerate(questions)
            if question is not None
            for wording in (*question.wordings, *question.kept_out)
        ]
        known = [False] * len(questions)
        replies = self._replies([self._prompt(wording) for _, wording in asked], REPLY_TOKENS)
        for (at, _), reply in zip(asked, replies, strict=True):
            known[at] |= is_right(reply, questions[at].answer)
        return known

    def _prompt(
        self, question: str, document: str | None = None, before: Sequence[tuple[str, str]] = ()
    ) -> list[int] | None:
        """Returns the tokens of a question; None if a text contains a control token of the model."""
        try:
            return list(prompt_for(question, self.tokenizer, document, before).input_ids)
        except TextsError:
            return None

    def _replies(self, prompts: list[list[int] | None], max_new_tokens: int) -> list[str]:
        """Returns the reply to each prompt; an empty one to a prompt that is missing or too long."""
        room = self.longest - max_new_tokens
        fitting = [at for at, prompt in enumerate(prompts) if prompt is not None and len(prompt) <= room]
        replies = [""] * len(prompts)
        if fitting:
            for at, reply in zip(fitting, self.answer([prompts[at] for at in fitting], max_new_tokens), strict=True):
                replies[at] = reply
        return replies


def _before(at: int) -> list[tuple[str, str]]:
    """Returns the example of a list."""
    ask, made = _LISTS[at]
    return [(f"{_EXAMPLE}\n\n{ask}", made)]


def _pairs(reply: str, part: str) -> Iterator[tuple[str, str]]:
    """Yields the questions of a list with their answers, if these stand in the text and not in the question."""
    for line in reply.splitlines():
        found = _WITH_ANSWER.fullmatch(_NUMBERING.sub("", line).strip())
        if found is None:
            continue
        question, answer = found["question"].strip(), found["answer"].strip(" .\"'*_")
        is_short = 1 <= len(_WORD.findall(answer)) <= MAX_ANSWER_WORDS and len(answer) <= MAX_ANSWER_CHARACTERS
        if is_short and answer.casefold() in part.casefold() and _is_question(question, answer):
            yield question, answer


def _wordings(reply: str, answer: str) -> Iterator[str]:
    for line in reply.splitlines():
        wording = _NUMBERING.sub("", line).strip()
        if wording.endswith(("?", "？")) and _is_question(wording, answer):
            yield wording


def _is_question(text: str, answer: str) -> bool:
    """Whether a text is as long as a question and does not give its answer away."""
    return 4 <= len(text) <= MAX_QUESTION_CHARACTERS and answer.casefold() not in text.casefold()


def _question(wordings: list[str], answer: str) -> Question | None:
    """Returns a question with two wordings kept out if there are four or more; None without wordings."""
    if not wordings:
        return None
    kept_out = 2 if len(wordings) >= 4 else 0
    return Question(tuple(wordings[: len(wordings) - kept_out]), tuple(wordings[len(wordings) - kept_out :]), answer)
