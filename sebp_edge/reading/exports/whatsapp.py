"""Reads chats as WhatsApp exports them, `_chat.txt` on iOS and `WhatsApp Chat with ....txt` on Android.

A message begins with its date in the order of the phone's language, so the order is found over the whole file. What
WhatsApp itself says is told by its marks where there are some, else by its words.
"""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain, pairwise

from sebp_edge.values.chats import Chat, ChatMessage
from sebp_edge.values.documents import Unreadable, unix_newlines

_MARKS = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_HEADER = re.compile(
    r"""
    ^[\u200e\u200f\u202a-\u202e]*
    (?P<open>\[)?
    (?P<a>\d{1,4})[^\d\n]{1,3}(?P<b>\d{1,2})[^\d\n]{1,3}(?P<c>\d{1,4})(?P<dot>\.)?
    [^\d\n\[\]]{1,15}?                                      # a comma, "at", "a. m."
    \d{1,2}[:.]\d{2}(?:[:.]\d{2})?
    [^\d\n\[\]:]{0,12}?                                     # "p. m.", with narrow spaces
    (?(open)\]|(?:[ ][-\u2013]|[,:]|(?(dot)(?<=:\d\d)|(?!))))[ ]   # nothing after "13. 6. 2018. 21:25:15"
    """,
    re.VERBOSE | re.MULTILINE,
)
_AUTHOR = re.compile(r"([^\n:\"\u201c\u201d\u201e\u00ab]{1,100}?)\s?:(?:[ ]|(?=\n)|\Z)")
# iOS puts a mark before its own words, on whatever language, even after the author's.
_OWN_WORDS = re.compile("\u200e[^\\n\u200e]{1,120}\\Z")
_EDITED = re.compile(r"<[^<>\n ]{1,30}(?: [^<>\n ]{1,30}){2,7}>\Z")
_ATTACHMENT = re.compile(
    r"<[^<>\n]{0,60}[\s\u0590-\uffff][^<>\n]{0,60}>|null|\S[^\n]*\.\w{2,4} \([^()\n]{5,40}\)|[^\n:]{3,20}: https://maps\.google\.com/\S+"
)
_DELETED = re.compile(
    r"""(?: this\ message\ was\ deleted | you\ deleted\ this\ message
      | diese\ nachricht\ wurde\ gelöscht | du\ hast\ diese\ nachricht\ gelöscht
      | se\ eliminó\ este\ mensaje | (?:este\ mensaje\ fue\ eliminado|eliminaste\ este\ mensaje)
      | ce\ message\ a\ été\ supprimé | vous\ avez\ supprimé\ ce\ message
      | (?:essa?\ |esta\ )?mensagem\ (?:foi\ )?apagada | você\ apagou\ esta\ mensagem
      | questo\ messaggio\ è\ stato\ eliminato | hai\ eliminato\ questo\ messaggio
      | dit\ bericht\ (?:is|werd)\ verwijderd | (?:u|je)\ hebt?\ dit\ bericht\ verwijderd
      | bu\ mesaj\ silindi | bu\ mesajı\ sildiniz | данное\ сообщение\ удалено | вы\ удалили\ данное\ сообщение
      | pesan\ ini\ telah\ dihapus | anda\ telah\ menghapus\ pesan\ ini )\.?""",
    re.VERBOSE | re.IGNORECASE,
)
_ENCRYPTED = re.compile(
    r"(?:messages|nachrichten|los mensajes|les messages|as mensagens|i messaggi|berichten|mesajlar|сообщения)\b.{0,80}"
    r"(?:end-to-end|ende-zu-ende|extremo a extremo|bout en bout|de ponta|eind-tot-eind|uçtan uca|сквозн).*",
    re.IGNORECASE,
)
_CALL = re.compile(
    r"(?:missed (?:group )?(?:voice|video) call|(?:voice|video) call|(?:verpasster )?(?:sprach|video)anruf"
    r"|llamada (?:perdida|de (?:voz|video))|appel (?:vocal|vidéo)|chamada de (?:voz|vídeo))[^\n]{0,40}",
    re.IGNORECASE,
)


def is_whatsapp(text: str) -> bool:
    """Returns whether a text, or its beginning, is a chat: it begins with a message, and most messages have authors."""
    headers = list(_HEADER.finditer(text[:20_000]))[:50]
    if not headers or text[: headers[0].start()].strip("\ufeff\n "):
        return False
    return 2 * sum(bool(_AUTHOR.match(text, header.end())) for header in headers) >= len(headers)


def read_whatsapp(text: str) -> Iterator[Chat]:
    """Yields the chat."""
    text = unix_newlines(text)
    is_open = bool(_HEADER.search(text)["open"])

    def headers() -> Iterator[re.Match]:
        # Somebody may have pasted a message of another phone into one.
        return (header for header in _HEADER.finditer(text) if bool(header["open"]) == is_open)

    days = _days(list(dict.fromkeys(header.group("a", "b", "c") for header in headers())))
    messages, left_out, names = [], Counter(), {}
    numbers = Counter(author for header in headers() for author, _ in _authors(text, header.end()))
    for header, following in pairwise(chain(headers(), [None])):
        end, day = following.start() if following else len(text), days[header.group("a", "b", "c")]
        author, begin = None, end
        for longer, after in _authors(text, header.end()):
            if author is None or numbers[longer] >= max(2, 0.9 * numbers[author]):
                author, begin = longer, after
        if author is None or day is None:
            left_out["system lines" if day else "messages without a valid date"] += 1
            continue
        kind, said = _kind(text[begin:end].strip("\n "))
        if said:
            if author not in names:
                names[author] = " ".join(_MARKS.sub("", author).removeprefix("~").split())
            messages.append(ChatMessage(names[author], day, said))
        if kind:
            left_out[kind] += 1
    if not messages:
        raise Unreadable("a WhatsApp chat without a message")
    yield Chat("WhatsApp", "", messages, left_out=left_out)


def _authors(text: str, begin: int) -> Iterator[tuple[str, int]]:
    """Yields what may be the author of a message, whose name may have colons in it, and where the words begin then."""
    at = begin
    for _ in range(3):
        if (found := _AUTHOR.match(text, at)) is None:
            return
        at = found.end()
        yield text[begin : found.end(1)], at


def _kind(said: str) -> tuple[str | None, str]:
    """Returns what of a message was left out, and the author's own words in it."""
    if said.startswith("\u200e"):
        return "attachments and system lines", ""
    kind = None
    if "\u200e" in said and (own_words := _OWN_WORDS.search(said)):
        is_edited = own_words[0].startswith("\u200e<") and not re.search(r"\d", own_words[0])
        kind, said = None if is_edited else "attachments and system lines", said[: own_words.start()]
    said = _MARKS.sub("", said).strip()
    first, _, rest = said.partition("\n")
    if _ATTACHMENT.fullmatch(first):
        return "attachments and system lines", rest.strip()
    for pattern, of_whatsapp in ((_DELETED, "deleted messages"), (_ENCRYPTED, "system lines"), (_CALL, "calls")):
        if not rest and pattern.fullmatch(first):
            return of_whatsapp, ""
    return kind, _EDITED.sub("", said).rstrip() if said.endswith(">") else said


def _days(dates: list[tuple[str, str, str]]) -> dict[tuple[str, str, str], str | None]:
    """Returns dates, in the order of their first messages, in the form 2024-03-01; None for one that does not exist."""
    numbers = [(int(a), int(b), int(c)) for a, b, c in dates]
    if all(len(a) == 4 for a, _, _ in dates):
        return {date: _iso(year, month, day) for date, (year, month, day) in zip(dates, numbers, strict=True)}
    day_first, month_first = any(a > 12 for a, _, _ in numbers), any(b > 12 for _, b, _ in numbers)
    if day_first and month_first:
        raise Unreadable("dates with the day first and dates with the month first; export the chat on one phone")
    if not (day_first or month_first):
        # Messages are in order, which only one of the two may show.
        falls = [
            sum(first > second for first, second in pairwise(order))
            for order in ([(c, b, a) for a, b, c in numbers], [(c, a, b) for a, b, c in numbers])
        ]
        month_first = falls[1] < falls[0]
    ordered = [(c, a, b) if month_first else (c, b, a) for a, b, c in numbers]
    return {date: _iso(year, month, day) for date, (year, month, day) in zip(dates, ordered, strict=True)}


def _iso(year: int, month: int, day: int) -> str | None:
    year += 2000 if year < 100 else 0
    return f"{year:04}-{month:02}-{day:02}" if 1 <= month <= 12 and 1 <= day <= 31 else None
