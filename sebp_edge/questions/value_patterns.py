"""The patterns by which values are found in a sentence, a kind each."""

import re

_MONTH = "January|February|March|April|May|June|July|August|September|October|November|December"
_WEEKDAY = "(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
NAME = r"(?:(?:Dr|Mr|Mrs|Ms|St)\.? )?(?!I['’])[A-Z][\w'’-]+(?: (?:[A-Z][\w'’-]+|of [A-Z][\w'’-]+))*"
DETERMINER = r"(?:a|an|the|my|our|his|her|their|its|some|no|each|every|two|three|four|five|six)"
_ENDS = (
    r"(?=[.,;:!?)](?!\d)|$"
    r"| (?:and|or|but|as|in|on|at|of|to|for|from|with|by|who|which|that|because|when|is|was|are|were)\b)"
)
# Of a noun phrase, as many words as lead to an end; else one or two.
_WORD = r"(?:(?!I\b|\d+[.,:]\d)[\w'’-]+)"
NOUN = rf"(?:(?:{_WORD} ){{0,3}}?{_WORD}{_ENDS}|(?:{_WORD} )?{_WORD})"
STREET = r"(?:Street|Lane|Road|Row|Avenue|Close|Square|Place|Way|Drive|Terrace)"
_TAIL = rf" of (?:{DETERMINER} )?{NOUN}| (?:with|to|for|from) (?:{NAME}|{DETERMINER} {NOUN})"
_PHRASE = rf"{DETERMINER} {NOUN}(?:{_TAIL})?"
# The first that matches at a place counts; each has a group "value".
VALUES = [
    (
        "date",
        rf"(?P<value>\d{{4}}-\d\d-\d\d|\d{{1,2}}(?:st|nd|rd|th)? (?:{_MONTH})(?: \d{{4}})?"
        rf"|(?:{_MONTH}) \d{{1,2}}(?:, \d{{4}})?|(?:every |each |on |next )?{_WEEKDAY}s?)",
    ),
    ("time", r"(?P<value>\d{1,2}[:.]\d\d(?: ?[ap]m)?|\d{1,2} ?(?:am|pm|o'clock)|half past \w+|noon|midnight)\b"),
    ("share", r"(?P<value>\d[\d.,]* ?(?:%|per ?cent\b))"),
    (
        "money",
        r"(?P<value>[€$£¥] ?\d[\d.,]*\d|[€$£¥] ?\d|\d[\d.,]* ?(?:euros?|dollars?|pounds?|kronor|kr|cents?|pence)\b)",
    ),
    (
        "code",
        rf"\b(?P<value>[A-Z]{{1,4}}[- ]?\d{{2,}}[\w-]*(?! (?:{_MONTH}))|\d{{2,}}(?:-\d+)+|\+?\d[\d ]{{6,}}\d"
        r"|v?\d+(?:\.\d+){2,}|\w[\w-]*\.[a-z]{2,4}(?=[\s,;:)]|$))(?!\w)",
    ),
    ("words", r"[\"“](?P<value>[^\"“”]{3,80}?)[,.]?[\"”]"),
    ("address", rf"\b(?P<value>\d+[a-z]? {NAME} {STREET})\b"),
    ("amount", r"\b(?P<value>\d+(?:[.,]\d+)?(?: ?(?:x|×) ?\d+)?(?: [a-z][\w-]*)?)"),
    ("reason", r"\b(?:because(?: of)?|since|so that) (?P<value>[^.;:!?]{4,60}?)(?=[.;:!?,]|$| and | but )"),
    ("called", rf"\b(?:called|named|[Nn]ame(?:'s| is)) (?P<value>{NAME}|{NOUN})"),
    (
        "place",
        rf"\b(?P<value>(?:in|at|on|under|behind|over|inside|beside|near|between|against|above|below|beneath|next to)"
        rf" (?:{_PHRASE}|{NAME}))",
    ),
    ("origin", rf"\b[Ff]rom (?P<value>{_PHRASE}|{NAME})"),
    ("agent", rf"\b(?:[Bb]y|[Ww]ith|[Ff]or) (?P<value>{NAME})"),
    ("target", rf"\bto (?P<value>{NAME})"),
    (
        "label",
        r"(?:(?:^|[.;,] )[^\W\d][\w '’/()-]{1,28}?(?:: | ?(?:→|[=-]>|=) ?)|^(?:[\w'’]+ ){1,4}[–—-] )"
        r"(?P<value>[^.;:→]{2,50}?)(?=[.;,(]|$| [–—-] )",
    ),
    ("name", rf"(?P<value>{NAME})"),
    ("thing", rf"\b(?P<value>{_PHRASE})"),
    (
        "kind",
        r"\b(?:is|was|are|were|ha[sd] been|have been|eats|needs|takes|likes|wants|has|had|bought|got)"
        rf" (?!called|named|been|to )(?P<value>{NOUN})",
    ),
]
PATTERN = re.compile(
    "|".join(f"(?P<{kind}>{pattern.replace('?P<value>', f'?P<{kind}_value>')})" for kind, pattern in VALUES)
)
