"""Chats become one document for each conversation and day, in which only the owner's words are learnt."""

import json

import pytest
from reading import read_all, read_texts, refusal, write_file

from sebp_edge.errors import TextsError

ANNA = """\
[01/03/24, 10:00:00] Bob: Are you coming?
[01/03/24, 10:01:00] Anna: Yes,
at eight.
[01/03/24, 10:02:00] Anna: Bring bread.
[01/03/24, 10:03:00] Bob: I will.
[02/03/24, 09:00:00] Anna: Thanks!
[13/03/24, 09:00:00] Bob: Alone today.
"""


def documents(texts, me="Anna") -> dict:
    return {document.source: document.content for document in read_texts(texts, me=me).documents}


def hashes(texts, me="Anna") -> set[str]:
    return {document.hash(b"salt") for document in read_texts(texts, me=me).documents}


def test_the_owners_turns_are_learnt_and_the_others_are_context(tmp_path):
    found = documents(write_file(tmp_path, "_chat.txt", ANNA))
    assert list(found) == ["_chat.txt, 2024-03-01", "_chat.txt, 2024-03-02"]
    first, second = found.values()
    # What follows the owner's last message teaches nothing.
    assert first.messages == (
        {"role": "user", "author": "Bob", "content": "Are you coming?"},
        {"role": "assistant", "author": "Anna", "content": "Yes,\nat eight.\nBring bread."},
    )
    assert first.turns == [1]
    # Chat templates begin with the user.
    assert second.messages == (
        {"role": "user", "content": ""},
        {"role": "assistant", "author": "Anna", "content": "Thanks!"},
    )


def test_with_more_than_two_people_each_line_of_the_others_begins_with_a_name(tmp_path):
    chat = "[13/03/24, 10:00] Bob: Who comes?\n[13/03/24, 10:00] Cem: Me.\n[13/03/24, 10:01] Anna: And me.\n"
    [content] = documents(write_file(tmp_path, "_chat.txt", chat)).values()
    assert content.messages[0] == {"role": "user", "content": "Bob: Who comes?\nCem: Me."}
    assert content.messages[1]["content"] == "And me."


def test_another_export_of_a_chat_makes_the_same_documents(tmp_path):
    whole = write_file(tmp_path, "a/_chat.txt", ANNA)
    android = ANNA.replace("[", "").replace(":00] ", " - ").replace("/24", "/2024")
    again = write_file(tmp_path, "b/WhatsApp Chat with Bob.txt", android)
    later = write_file(tmp_path, "c/_chat.txt", ANNA + "[14/03/24, 08:00:00] Anna: A new day.\n")
    assert hashes(whole) == hashes(again)
    assert hashes(whole) < hashes(later)
    assert len(hashes(later) - hashes(whole)) == 1
    reading = read_texts(tmp_path, me="Anna")
    assert len(reading.documents) == 3
    assert reading.num_equal == 4


def test_the_same_words_of_other_people_are_another_document(tmp_path):
    one = write_file(tmp_path, "a.txt", ANNA)
    other = write_file(tmp_path, "b.txt", ANNA.replace("Bob", "Cem"))
    assert not hashes(one).isdisjoint(hashes(other))  # of the day on which only Anna wrote
    assert hashes(one) != hashes(other)


def test_the_authors_are_counted_before_anybody_says_who_the_owner_is(tmp_path):
    path = write_file(tmp_path, "_chat.txt", ANNA)
    reading = read_all(path)
    assert reading.exports == ("a WhatsApp chat with 2 people, 6 messages",)
    assert [(author.name, author.num_messages, author.num_words) for author in reading.authors] == [
        ("Bob", 3, 7),
        ("Anna", 3, 6),
    ]
    assert not reading.documents
    # What was read is not read again.
    path.unlink()
    reading = read_texts(reading, me="Anna")
    assert [author.is_owner for author in reading.authors] == [False, True]
    assert len(reading.documents) == 2


def test_without_the_owners_name_chats_are_refused_and_nobody_is_named(tmp_path):
    message = refusal(write_file(tmp_path, "_chat.txt", ANNA))
    assert message == (
        "These texts are a WhatsApp chat with 2 people, 6 messages: say which names are yours, with me= or --me."
    )


def test_names_are_compared_as_people_type_them(tmp_path):
    path = write_file(tmp_path, "_chat.txt", ANNA.replace("Anna", "\u202aAnna\u00a0 Äbi\u202c"))
    assert len(documents(path, me="anna äbi")) == len(documents(path, me=["ANNA ÄBI"])) == 2


def test_a_name_that_nobody_has_is_refused(tmp_path):
    with pytest.raises(TextsError, match="Nobody in these chats is called 'Ana'; give a name as the chats have it"):
        read_texts(write_file(tmp_path, "_chat.txt", ANNA), me=["Anna", "Ana"])


def test_of_two_people_of_one_name_the_id_is_asked_for(tmp_path):
    anna = {"type": "message", "date": "2024-03-01T10:00:00", "from": "Anna"}
    messages = [anna | {"from_id": "user1", "text": "Hi."}, anna | {"from_id": "user2", "text": "Hello."}]
    chat = {"name": "Trip", "type": "private_group", "id": 7, "messages": messages}
    path = write_file(tmp_path, "result.json", json.dumps(chat))
    expected = "Telegram has several people called 'Anna'; give the id of one or more: user1, user2"
    with pytest.raises(TextsError, match=expected):
        read_texts(path, me="Anna")
    [content] = documents(path, me="user2").values()
    assert [message["content"] for message in content.messages] == ["Hi.", "Hello."]


def test_days_and_chats_without_the_owner_are_left_out_and_counted(tmp_path):
    write_file(tmp_path, "a.txt", ANNA)
    write_file(tmp_path, "b.txt", ANNA.replace("Anna", "Cem"))
    reading = read_texts(tmp_path, me="Anna")
    assert {document.source.split(",")[0] for document in reading.documents} == {"a.txt"}
    counts = {"a.txt": 1, "b.txt": 3}
    assert [(item.source, item.reason) for item in reading.left_out] == [
        (name, f"days of chats without a message of yours: {count}") for name, count in counts.items()
    ]


def test_notes_beside_chats_are_documents_too(tmp_path):
    write_file(tmp_path, "_chat.txt", ANNA)
    write_file(tmp_path, "note.md", "A note.")
    assert list(documents(tmp_path)) == ["note.md", "_chat.txt, 2024-03-01", "_chat.txt, 2024-03-02"]
