"""Cuts texts into the terms that are searched: words, or pairs of characters in scripts without spaces between words.

Both notes and questions become terms here: SQLite's tokenizers need to know no language, and nothing in a question can
be an operator.
"""

import re
import unicodedata

from sebp_edge.ask.values import date_terms, plain_numbers
from sebp_edge.basics.scripts import UNSPACED

_ASCII_WORD = re.compile(r"[a-z0-9]+")
_UNSPACED_RUN = re.compile(f"[{UNSPACED}]+")
# The vowel signs of Indian scripts are no letters to `re`, but belong to words.
_WORD = re.compile(rf"(?:[^\W_{UNSPACED}]|[\u0900-\u0963\u0966-\u0dff])+")
# Accents of Latin, Greek and Cyrillic letters, and the vowel points of Hebrew and Arabic.
_ACCENTS = re.compile("[\u0300-\u036f\u0591-\u05bd\u05bf-\u05c7\u0610-\u061a\u064b-\u065f\u0670]")
# Letters that Unicode does not take apart.
_LETTERS = str.maketrans({"ø": "o", "æ": "ae", "œ": "oe", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ı": "i"})


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that say little about what is asked, in English, and in other languages that are written with spaces.
_ENGLISH = _words("""
    a about after all also am an and any are as at be been before but by can could did do does for from get go got had
    has have her him his how i if in into is it its just me much many my need not of off on or our out she should so
    some tell that the their them then there they this to up us was we were what when where which who whom whose why
    will with would you your
""")
_OTHERS = _words("""
    der das und ist nicht mit ein eine einen den dem von zu auf fur wir ich wie wann wo wer welche welcher welches habe
    haben het een van de en op niet wij ik voor naar hoe wanneer waar wie welke heb hebben la le les et des une du pour
    quel quelle quand qui est el los las que con por una cual cuando donde quien il di che per non sono quando dove chi
    da os uma att det ett och som jag nar var af til ikke hvor nie sie jest kiedy gdzie bir muss wird sind mein meine
    meiner meines unser unsere uns zum zur im bei laut viel oft kann soll ab vor nach aus mich mir welchem wem wat mijn
    onze ons moet zijn er aan bij tot kan uit te dat die gaat mon ma mes notre nos sont mi mis nuestro nuestra mio mia
""")
# Words that say what kind of thing is asked for. Not among the English ones, since some are words of other languages.
_ASKING = _words("call called calls mean means name named names sort sorts stand stands type types")
# Without those that stand in texts of other languages too.
_ENGLISH_ONLY = _ENGLISH - _words("a am an in is it on for so we of at as her his has had was i do also all me")


def is_small(word: str) -> bool:
    """Whether a word says little about what is asked."""
    return word in _ENGLISH or word in _OTHERS or word in _ASKING


def plain(text: str) -> str:
    """Returns a text in lower case, without accents, and with wide and other forms of characters as the usual ones."""
    if text.isascii():
        return text.lower()
    text = unicodedata.normalize("NFKD", text.casefold()).translate(_LETTERS)
    # Composed again, since Korean syllables are taken apart too, and Japanese marks of sound are no accents.
    return unicodedata.normalize("NFC", _ACCENTS.sub("", text))


def terms(text: str) -> list[str]:
    """Returns the words of a text, the pairs of characters in other runs, and one term more for each date.

    "東京駅" has 東京, 京駅 and 駅, so each character begins a term.
    """
    text = plain_numbers(plain(text))
    if text.isascii():
        return _ASCII_WORD.findall(text) + date_terms(text)
    pairs = [run[at : at + 2] for run in _UNSPACED_RUN.findall(text) for at in range(len(run))]
    return _WORD.findall(text) + pairs + date_terms(text)


def is_english(words: list[str]) -> bool | None:
    """Whether a text with these terms is English, by its small words; None if they do not tell."""
    ours, theirs = (sum(map(small.__contains__, words)) for small in (_ENGLISH_ONLY, _OTHERS))
    if ours == theirs:
        return None if all(word.isascii() for word in words) else False
    return ours > theirs
