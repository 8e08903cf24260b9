"""Questions about notes with their accepted answers, and whether a reply is right.

A reply is right if an accepted answer stands in its first sentence, at word borders. Both are normalised before: case,
accents, punctuation, articles, number words, and the ways to write a date or a time of day.
"""

import re
import tomllib
import unicodedata
from dataclasses import dataclass
from pathlib import Path

# A reply counts up to here, so that one that lists everything is not right.
MAX_WORDS = 24

MONTHS, ONES, ORDINALS, TENS = map(
    str.split,
    (
        "january february march april may june july august september october november december",
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen",
        "zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
        "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth",
        "twenty thirty forty fifty sixty seventy eighty ninety",
    ),
)
MONTH_OF = {short: month for month in MONTHS for short in (month, month[:3])} | {"sept": "september"}
ORDINAL_TENS = [f"{word[:-1]}ieth" for word in TENS]
NUMBER_OF = {word: number for words in (ONES, ORDINALS) for number, word in enumerate(words)} | {
    word: 10 * number for words in (TENS, ORDINAL_TENS) for number, word in enumerate(words, 2)
}
IGNORED = {"a", "an", "the", "my", "your", "his", "her", "our", "their"}


def _any(words) -> str:
    return f"({'|'.join(sorted(words, key=len, reverse=True))})"


TENS_AND_ONES = re.compile(rf"\b{_any(TENS)}[- ]{_any(ONES[1:10] + ORDINALS[1:10])}\b")
NUMBER_WORD = re.compile(rf"\b{_any(NUMBER_OF)}\b")
HUNDREDS = re.compile(r"\b(\d+|a) hundred(?:(?: and)? (\d{1,2})\b)?")
THOUSANDS = re.compile(r"\b(\d+|a) thousand(?:(?: and)? (\d{1,3})\b)?")
HALF = re.compile(r"\b(\d+) and a half\b")
THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}\b)")
ORDINAL_END = re.compile(r"\b(\d+)(?:st|nd|rd|th)\b")
LEADING_ZEROS = re.compile(r"(?<![\d.:])0+(?=\d)")
PENCE = re.compile(r"([£€$] ?\d+)\.00\b")
ISO_DATE = re.compile(r"\b\d{4}-(0[1-9]|1[0-2])-(\d\d)\b")
DAY_FIRST = re.compile(rf"\b(\d\d?) (?:day )?(?:of )?{_any(MONTH_OF)}\b")
MONTH_FIRST = re.compile(rf"\b{_any(MONTH_OF)}\.? (?:the )?(\d\d?)\b(?![.:]\d)")
CLOCK = re.compile(r"\b(\d\d?)(?:[.:](\d\d))? ?([ap])\.?m\b")
# "1930s" is not 1930.
WORD = re.compile(r"[a-z]+_\d+|\d+s\b|\d+(?:\.\d+)*|[^\W\d_]+")
# The end of these words is not the end of a sentence: titles, initials, the number of a list's first line.
NO_END = re.compile(r"(?:dr|mr|mrs|ms|st|no|approx|\w)\.", re.IGNORECASE)
OPENING = re.compile(r"(?:yes|sure|of course|certainly|okay|answer)[,.:!]+\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Question:
    """A question about one document; any of the accepted answers is right."""

    document: str
    question: str
    answers: tuple[str, ...]


def read(file: Path) -> list[Question]:
    """Reads the questions of a TOML file."""
    found = tomllib.loads(file.read_text(encoding="utf-8"))["question"]
    return [Question(each["document"], each["question"], tuple(each["answers"])) for each in found]


def is_right(reply: str, answers: tuple[str, ...] | list[str]) -> bool:
    """Returns whether one of the answers stands in the reply's first sentence."""
    sentence = first_sentence(reply)
    return any(stands_in(answer, sentence) for answer in answers)


def stands_in(answer: str, text: str) -> bool:
    """Returns whether the answer's words stand in the text in one piece, both normalised."""
    wanted = " ".join(normalised(answer))
    if not wanted:
        raise ValueError(f"The answer {answer!r} has no words; expected at least one letter or digit.")
    return f" {wanted} " in f" {' '.join(normalised(text))} "


def first_sentence(reply: str) -> str:
    """The reply's first sentence, cut to MAX_WORDS words; "Sure!" and the like do not count as one."""
    sentence = []
    for word in OPENING.sub("", reply.strip(" \n*#>-"), count=1).partition("\n")[0].split()[:MAX_WORDS]:
        sentence.append(word)
        if word.rstrip("\"'*)").endswith((".", "!", "?")) and not NO_END.fullmatch(word):
            break
    return " ".join(sentence)


def normalised(text: str) -> list[str]:
    """The words of a text without articles and possessives; a date, a time of day and a number are one word each."""
    return [word for word in WORD.findall(_with_dates(_with_digits(_plain(text)))) if word not in IGNORED]


def _plain(text: str) -> str:
    """Lower case without accents, with simple hyphens and apostrophes; "'s" goes."""
    text = unicodedata.normalize("NFKD", text.replace("_", " ").replace("\u2019", "'")).casefold()
    text = "".join(character for character in text if not unicodedata.combining(character))
    text = re.sub(r"[\u2010-\u2015]", "-", text)
    return " ".join(re.sub(r"'s\b", "", text).split())


def _with_digits(text: str) -> str:
    """Number words and ordinals as digits, amounts without ".00"."""
    text = TENS_AND_ONES.sub(lambda found: str(NUMBER_OF[found[1]] + NUMBER_OF[found[2]]), text)
    text = NUMBER_WORD.sub(lambda found: str(NUMBER_OF[found[1]]), text)
    text = HALF.sub(r"\1.5", text)
    text = PENCE.sub(r"\1", ORDINAL_END.sub(r"\1", THOUSANDS_COMMA.sub("", text)))
    for pattern, unit in ((HUNDREDS, 100), (THOUSANDS, 1000)):
        text = pattern.sub(lambda found, unit=unit: _sum(found, unit), text)
    return text


def _sum(found: re.Match, unit: int) -> str:
    """Such as 250 for "2 hundred and 50"."""
    return str((1 if found[1] == "a" else int(found[1])) * unit + int(found[2] or 0))


def _with_dates(text: str) -> str:
    """Dates such as "march_12", times of day such as "18.40"; no leading zeros."""
    text = ISO_DATE.sub(lambda date: f"{date[2]} {MONTHS[int(date[1]) - 1]}", text)
    text = CLOCK.sub(lambda time: f"{int(time[1]) % 12 + 12 * (time[3] == 'p')}.{time[2] or '00'}", text)
    text = LEADING_ZEROS.sub("", text)
    text = DAY_FIRST.sub(lambda date: f" {MONTH_OF[date[2]]}_{date[1]} ", text)
    text = MONTH_FIRST.sub(lambda date: f" {MONTH_OF[date[1]]}_{date[2]} ", text)
    return re.sub(r"(?<=\d):(?=\d\d\b)", ".", text)
