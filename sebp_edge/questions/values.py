"""What kind of value a span of text is: a date, a price, a telephone number."""

import re

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_DAY = r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
_NUMBER_WORD = (
    r"(?:(?:a |one |two |three |four |five |six |seven |eight |nine )?(?:half a|half|dozen|hundred|thousand)"
    r"|(?:twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety)(?:-\w+)?"
    r"|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen"
    r"|eighteen|nineteen)"
)
NUMBER = rf"(?:\d[\d.,]*(?:[/-]\d+)?|½|¼|¾|{_NUMBER_WORD})"
_CLOCK = r"(?:\d{1,2}:\d{2}(?:\s?[ap]\.?m\.?)?|(?:[01]\d|2[0-3])\.[0-5]\d|\d{1,2}\s?[ap]\.?m\.?|noon|midnight)"
_DATE = (
    rf"(?:{_DAY},? )?(?:the )?(?:\d{{1,2}}(?:st|nd|rd|th)?\.? (?:of )?{_MONTH}(?:,? \d{{4}})?"
    rf"|{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?|\d{{4}}-\d{{2}}-\d{{2}}|\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}})"
)
_CURRENCY = (
    r"(?:euros?|EUR|dollars?|USD|pounds?|GBP|pence|cents?|kronor|krona|kroner|SEK|NOK|DKK|francs?|CHF|yen|JPY|rupees?)"
)
_UNIT = (
    r"(?:kg|kilos?|kilograms?|g|grams?|mg|lbs?|ounces?|oz|tons?|tonnes?|ml|cl|dl|l|litres?|liters?|gallons?|cups?"
    r"|tablespoons?|tbsp|teaspoons?|tsp|mm|cm|m|metres?|meters?|km|kilometres?|kilometers?|miles?|inch(?:es)?|feet|ft"
    r"|m²|m2|W|kW|kWh|V|volts?|watts?|amps?|A|bar|psi|Hz|MB|GB|TB|%|percent|m/s|km/h|mph|rpm|knots)"
)
_PERIOD = r"(?:seconds?|minutes?|mins?|hours?|hrs?|h|min|days?|nights?|weeks?|months?|years?)"

_KINDS = {
    "email": re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"),
    "date": re.compile(rf"{_DATE}(?:,? (?:at )?{_CLOCK})?"),
    "time": re.compile(rf"{_CLOCK}(?: ?(?:-|–|to|and) ?{_CLOCK})?|{_NUMBER_WORD} o['’]clock"),
    "money": re.compile(
        rf"(?:about |around |only )?(?:[£€$¥]\s?\d[\d.,]*(?:\s?[km])?|{NUMBER}\s?(?:[£€$¥]|{_CURRENCY}))"
        rf"(?: (?:per|a|an|each)(?: \w+)?)?",
        re.IGNORECASE,
    ),
    "year": re.compile(r"(?:19|20)\d\d"),
    "temperature": re.compile(rf"(?:minus |-)?{NUMBER}\s?(?:°\s?[CF]?|degrees(?: [CF]\w*)?)", re.IGNORECASE),
    "duration": re.compile(
        rf"(?:about |around )?{NUMBER}(?:\s?(?:-|–|to|or) ?{NUMBER})?\s?{_PERIOD}|an hour|half an hour|a week|a year"
        r"|a month|a day",
        re.IGNORECASE,
    ),
    "amount": re.compile(rf"(?:about |around )?{NUMBER}\s?{_UNIT}(?: (?:of )?\w+)?"),
    "phone": re.compile(r"(?:\+|\b0)\d[\d ()/-]{5,18}\d|\d{3,4}[ -]\d{3,4}(?:[ -]\d{2,4}){0,2}"),
    "number": re.compile(rf"(?:about |around )?{NUMBER}", re.IGNORECASE),
    "code": re.compile(r"(?=\S*\d)[A-Za-z0-9][\w#./:-]+"),
    "weekday": re.compile(rf"(?:every |each |on |last |next )?{_DAY}s?(?: \w+)?"),
    "colour": re.compile(
        r"(?:(?:dark|light|pale|bright|deep) )?(?:red|blue|green|yellow|black|white|grey|gray|brown|orange|pink|purple"
        r"|violet|turquoise|beige|cream|silver|gold|golden|navy|maroon)(?: and \w+)?",
        re.IGNORECASE,
    ),
    "name": re.compile(
        r"(?:(?:Dr|Mr|Mrs|Ms|Prof|St)\.? )?[A-Z][a-zà-ÿ'’-]+(?: (?:[A-Z]\.|de|von|van|der|[A-Z][A-Za-zà-ÿ'’-]+)){0,3}"
    ),
}
_TIME_CONTENT = re.compile(
    rf"(?:{_DATE}|{_DAY}s?|{_MONTH}(?: \d{{4}})?|(?:19|20)\d\d|{_CLOCK}|(?:the )?(?:spring|summer|autumn|winter|weekend"
    rf"|weekends|morning|mornings|evening|evenings|afternoon|afternoons|night|end|beginning|start|middle) ?.*|Easter"
    rf"|Christmas|{_NUMBER_WORD}(?: o['’]clock| in the \w+| sharp)?|half past \w+|quarter (?:past|to) \w+"
    rf"|the (?:first|second|third|fourth|last) {_DAY}"
    rf"|(?:last|next|this|every|each|early|late|mid) .*|the \d{{1,2}}(?:st|nd|rd|th))"
    r"(?:,? (?:at|from|on|in|of|until|and|or) .*)?"
)
_HAS_DATE = re.compile(rf"{_DATE}|{_DAY}|{_CLOCK}|\b(?:19|20)\d\d\b|\b{_MONTH}(?![a-z])")


def kind_of(text: str) -> str:
    """Returns the kind of a value, or "text"."""
    if len(text) > 80:
        return "text"
    return next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(text)), "text")


def is_time(content: str) -> bool:
    """Whether what follows a preposition is a time, as "3 May" or "the evening"."""
    return len(content) <= 80 and bool(_TIME_CONTENT.fullmatch(content))


def has_date(text: str) -> bool:
    return bool(_HAS_DATE.search(text))
