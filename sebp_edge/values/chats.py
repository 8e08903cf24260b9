"""Chats and mails as they were exported, whose words they are, and the documents made of them.

A document is one conversation on one day, or one sent mail. It depends on words and authors only, so that another
export of the same chat makes the same documents.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from sebp_edge.basics.units import plural
from sebp_edge.errors import TextsError
from sebp_edge.values.documents import Conversation, LeftOut, Message

# The author of the owner's words in exports that have no name for them.
OWNER = "You"

Person = tuple[str, str]  # a service and an id


class ChatMessage(NamedTuple):
    """What somebody wrote.

    Attributes:
        author: the id of a person, which is the name if the service has no ids.
        day: the date in the export, such as "2024-03-01"; "" if it has none.
    """

    author: str
    day: str
    text: str


@dataclass(slots=True)
class Chat:
    """A chat as it was exported, or a mail after the one that it answers.

    Attributes:
        service: the program that it is from.
        id: tells it from other chats of the same file, and is the same in each export; "" if the file is one chat.
        names: people's names by their ids; an id that is missing is a name.
        owner: the id of the export's owner, if the export says so.
        left_out: how much was not read, by its kind.
        is_mail: whether only the last message is to be learnt, if the owner wrote it.
    """

    service: str
    id: str
    messages: list[ChatMessage]
    names: Mapping[str, str] = field(default_factory=dict)
    owner: str | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)
    is_mail: bool = False

    @property
    def num_bytes(self) -> int:
        """The size of its texts in UTF-8."""
        return sum(len(message.text.encode(errors="surrogatepass")) for message in self.messages)


class Names(NamedTuple):
    """A file of an export that has the names of people whose ids stand in other files."""

    service: str
    names: dict[str, str]


class Author(NamedTuple):
    """Somebody whose words are in the chats.

    Attributes:
        is_owner: whether the words are those of the texts' owner; False if nobody has said so.
    """

    service: str
    id: str
    name: str
    num_messages: int
    num_words: int
    is_owner: bool


class Chats:
    """The chats of all files."""

    def __init__(self):
        self._found: list[tuple[str, Chat]] = []
        self._names: dict[Person, str] = {}
        self._added: Mapping[str, str] = {}  # many chats share their names

    def add(self, source: str, part: Chat | Names) -> None:
        """Adds a part of the file that is called `source`."""
        if isinstance(part, Chat):
            self._found.append((source, part))
        if part.names is not self._added:
            self._added = part.names
            self._names |= {(part.service, id): name for id, name in part.names.items()}

    def __iter__(self) -> Iterator[tuple[str, Chat]]:
        return iter(self._found)

    def __bool__(self) -> bool:
        return bool(self._found)

    def authors(self, me: Sequence[str] = ()) -> tuple[Author, ...]:
        """Returns who wrote, those with most messages first.

        Args:
            me: see `documents`; nobody but owners that exports name if it is empty.

        Raises:
            TextsError: see `documents`.
        """
        counts, words = Counter(), Counter()
        for _, chat in self._found:
            for message in chat.messages[-1:] if chat.is_mail else chat.messages:  # without the mail that one answers
                counts[chat.service, message.author] += 1
                words[chat.service, message.author] += len(message.text.split())
        owners = {(chat.service, chat.owner) for _, chat in self._found} | (
            self._owners(me) if me and self.need_owner else set()
        )
        return tuple(
            Author(service, id, self._name((service, id)), number, words[service, id], (service, id) in owners)
            for (service, id), number in counts.most_common()
        )

    @property
    def need_owner(self) -> bool:
        """Whether one of them does not say who the owner is."""
        return any(chat.owner is None for _, chat in self._found)

    def summaries(self) -> tuple[str, ...]:
        """Returns what was found, such as "a WhatsApp chat with 3 people, 12,345 messages"."""
        found = []
        for service in dict.fromkeys(chat.service for _, chat in self._found):
            chats = [(source, chat) for source, chat in self._found if chat.service == service]
            people = len({message.author for _, chat in chats for message in chat.messages})
            number = len({chat.id or source for source, chat in chats})
            by_people = "1 person" if people == 1 else f"{people:,} people"
            if chats[0][1].is_mail:
                found.append(f"{plural(len(chats), 'mail')} by {by_people}")
                continue
            what = f"a {service} chat" if number == 1 else f"{number:,} {service} chats"
            found.append(f"{what} with {by_people}, {plural(sum(len(chat.messages) for _, chat in chats), 'message')}")
        return tuple(found)

    def documents(self, me: Sequence[str]) -> Iterator[tuple[str, Conversation] | LeftOut]:
        """Yields the documents, each with its name, and what is left out.

        Args:
            me: the names or ids of the owner, of whom each service may have another one.

        Raises:
            TextsError: nobody has such a name, or two people of one service have it.
        """
        owners = self._owners(me) if self.need_owner else set()
        counts: Counter[tuple[str, str]] = Counter()
        for source, chat in self._found:
            mine = {id for service, id in owners if service == chat.service} if chat.owner is None else {chat.owner}
            for day, messages in _days(chat):
                if conversation := self._conversation(chat, messages, mine):
                    yield _name_of_day(source, chat, day), conversation
                else:
                    counts[
                        source, "mails of others" if chat.is_mail else "days of chats without a message of yours"
                    ] += 1
        for (source, kind), count in counts.items():
            yield LeftOut(source, f"{kind}: {count:,}")

    def talks(self) -> Iterator[tuple[str, str]]:
        """Yields all that people wrote, with a name for each day of a chat and each mail, and who wrote each line."""
        for source, chat in self._found:
            for day, messages in _days(chat):
                said = (f"{self._name((chat.service, each.author))}: {self._text(chat, each)}" for each in messages)
                yield _name_of_day(source, chat, day), "\n".join(said)

    def _owners(self, me: Sequence[str]) -> set[Person]:
        people = {(chat.service, message.author) for _, chat in self._found for message in chat.messages}
        found: set[Person] = set()
        for name in me:
            wanted = _plain(name)
            own = {person for person in people if person[1] == name} or {
                person for person in people if wanted in (_plain(person[1]), _plain(self._name(person)))
            }
            if not own:
                raise TextsError(f"Nobody in these chats is called {name!r}; give a name as the chats have it.")
            if twice := next((service for service, n in Counter(service for service, _ in own).items() if n > 1), None):
                ids = ", ".join(sorted(id for service, id in own if service == twice))
                raise TextsError(f"{twice} has several people called {name!r}; give the id of one or more: {ids}.")
            found |= own
        return found

    def _name(self, person: Person) -> str:
        return self._names.get(person) or person[1]

    def _conversation(self, chat: Chat, messages: list[ChatMessage], mine: Set[str]) -> Conversation | None:
        """Returns the conversation up to the owner's last message; None if there is none."""
        own = [index for index, message in enumerate(messages) if message.author in mine]
        if not own or (chat.is_mail and messages[-1].author not in mine):
            return None
        messages = messages[: own[-1] + 1]
        with_names = len({message.author for message in messages} - mine) > 1
        # Chat templates begin with the user.
        turns: list[Message] = [{"role": "user", "content": ""}] if messages[0].author in mine else []
        for is_mine, group in groupby(messages, lambda message: message.author in mine):
            said = [(self._name((chat.service, message.author)), self._text(chat, message)) for message in group]
            if with_names and not is_mine:
                turns.append({"role": "user", "content": "\n".join(f"{name}: {text}" for name, text in said)})
            else:
                content = "\n".join(text for _, text in said)
                turns.append({"role": "assistant" if is_mine else "user", "author": said[0][0], "content": content})
        return Conversation(tuple(turns))

    def _text(self, chat: Chat, message: ChatMessage) -> str:
        """Returns a message with names in place of the ids of people."""
        if "<@" not in message.text:
            return message.text
        return _MENTION.sub(lambda found: "@" + self._name((chat.service, found[1])), message.text)


_MENTION = re.compile(r"<@!?(\w+)(?:\|[^<>]*)?>")


def _plain(name: str) -> str:
    """Returns a name as people type it: without case, marks of direction and wide spaces."""
    signs = (sign for sign in unicodedata.normalize("NFKC", name) if unicodedata.category(sign) != "Cf")
    return " ".join("".join(signs).split()).casefold()


def _name_of_day(source: str, chat: Chat, day: str) -> str:
    return ", ".join([source, *(part for part in (chat.id, day) if part not in source)])


def _days(chat: Chat) -> Iterator[tuple[str, list[ChatMessage]]]:
    if chat.is_mail:
        yield chat.messages[-1].day, chat.messages
        return
    days: defaultdict[str, list[ChatMessage]] = defaultdict(list)
    for message in chat.messages:
        days[message.day].append(message)
    yield from days.items()
