"""Exports of chats and mails are told by their contents, and read with what is not their people's words left out."""

import json

import pytest
from reading import read_all, read_texts, refusal, write_file


def said(path) -> list[tuple[str, str, str]]:
    """The author, day and text of all messages, in their order."""
    reading = read_all(path)
    names = {(author.service, author.id): author.name for author in reading.authors}
    return [
        (names[chat.service, message.author], message.day, message.text)
        for _, chat in reading.chats
        for message in chat.messages
    ]


def unread(path) -> dict[str, int]:
    pairs = (item.reason.rpartition(": ") for item in read_all(path).left_out)
    return {kind: int(number) for kind, _, number in pairs}


# ------------------------------------------------------------------------------------------------------------ WhatsApp


@pytest.mark.parametrize(
    "begin",
    [
        "[13/03/2024, 22:01:02] ",
        "\u200e[13/03/24, 10:01:02\u202fPM] ",
        "[2024-03-13, 10:01:02 p.\u00a0m.] ",
        "[13.03.24, 22:01:02] ",
        "[3/13/24, 10:01:02\u202fPM] ",
        "13/03/2024, 22:01 - ",
        "13/03/2024 à 22:01 - ",
        "3/13/24, 10:01\u202fPM - ",
        "13/3/2024, 10:01 p. m. - ",
        "13.3.2024 klo 22.01 - ",
        "2024/03/13 22:01 - ",
        "13. 3. 2024. 22:01:15 ",
        "2024. 03. 13. 22:01 - ",
        "2024/3/13 下午10:01 - ",
        "2024. 3. 13. 오후 10:01, ",
        "\u200f\u0661\u0663\u200f/\u0663\u200f/\u0662\u0660\u0662\u0664\u060c \u0661\u0660:\u0660\u0661 م - ",
    ],
)
def test_whatsapp_writes_dates_in_many_ways(tmp_path, begin):
    text = f"{begin}Anna: Are you\nthere: now?\n{begin}\u202a+49 1522 1234\u202c: Yes\n"
    assert said(write_file(tmp_path, "a.txt", text)) == [
        ("Anna", "2024-03-13", "Are you\nthere: now?"),
        ("+49 1522 1234", "2024-03-13", "Yes"),
    ]


@pytest.mark.parametrize(
    ("dates", "expected"),
    [
        (("03/04/24", "13/04/24"), ["2024-04-03", "2024-04-13"]),
        (("03/04/24", "04/13/24"), ["2024-03-04", "2024-04-13"]),
        (("03/04/24", "05/04/24", "02/05/24"), ["2024-04-03", "2024-04-05", "2024-05-02"]),
        (("04/03/24", "04/05/24", "05/02/24"), ["2024-04-03", "2024-04-05", "2024-05-02"]),
        (("03/04/24",), ["2024-04-03"]),
    ],
)
def test_the_order_of_whatsapps_dates_is_found_over_the_whole_file(tmp_path, dates, expected):
    text = "".join(f"{date}, 10:00 - Anna: Hello\n" for date in dates)
    assert [day for _, day, _ in said(write_file(tmp_path, "a.txt", text))] == expected


@pytest.mark.parametrize("begin", ["[13.03.24, 22:01:02] ", "13/03/2024, 22:01 - "])
def test_a_colon_may_be_part_of_a_whatsapp_name(tmp_path, begin):
    lines = [
        *("Anna: Where: here?", "Bea: Garten: In the shed: left", "Bea: Garten: <Media omitted>", "Anna: Yes"),
        *("Bea: Garten: https://a.b", "A: B: C: One", "A: B: C: Two", "Anna: PS: no", "Anna: At 10:30: tea"),
        "Bo: Todo: x",
    ]
    assert said(write_file(tmp_path, "a.txt", "\n".join(f"{begin}{line}" for line in lines))) == [
        (name, "2024-03-13", text)
        for name, text in [
            *(("Anna", "Where: here?"), ("Bea: Garten", "In the shed: left"), ("Anna", "Yes")),
            *(("Bea: Garten", "https://a.b"), ("A: B: C", "One"), ("A: B: C", "Two"), ("Anna", "PS: no")),
            *(("Anna", "At 10:30: tea"), ("Bo", "Todo: x")),
        ]
    ]


def test_whatsapps_own_words_are_left_out(tmp_path):
    lines = [
        "13/03/2024, 22:00 - Messages and calls are end-to-end encrypted. Tap to learn more.",
        '13/03/2024, 22:00 - Bob created group "Trip: south"',
        "13/03/2024, 22:01 - Anna: <Media omitted>",
        "13/03/2024, 22:01 - Anna: IMG-2024-WA01.jpg (file attached)\nOur tree",
        "13/03/2024, 22:02 - Anna: <Medien ausgeschlossen>",
        "13/03/2024, 22:03 - Bob: This message was deleted",
        "13/03/2024, 22:04 - Bob: Diese Nachricht wurde gelöscht.",
        "13/03/2024, 22:05 - Bob: Missed voice call",
        "13/03/2024, 22:06 - Anna: Better so <This message was edited>",
        "13/03/2024, 22:07 - Anna: a < b and <3",
    ]
    path = write_file(tmp_path, "WhatsApp Chat with Bob.txt", "\r\n".join(lines))
    assert [text for *_, text in said(path)] == ["Our tree", "Better so", "a < b and <3"]
    assert unread(path) == {"system lines": 2, "attachments and system lines": 3, "deleted messages": 2, "calls": 1}


def test_on_ios_whatsapps_own_words_have_a_mark_in_any_language(tmp_path):
    begin = "[13.03.24, 22:01:02] "
    lines = [
        f"{begin}Trip: \u200eNachrichten und Anrufe sind Ende-zu-Ende-verschlüsselt.",
        f"\u200e{begin}~\u202fAnna: \u200eBild weggelassen",
        f"\u200e{begin}~\u202fAnna: Seht \u200e<Anhang: 00000012-PHOTO.jpg>",
        f"{begin}~\u202fAnna: An \u2068@Bob\u2069 alle \u200e<Diese Nachricht wurde bearbeitet.>",
        f"{begin}Bob: \u200eDu hast diese Nachricht gelöscht.",
    ]
    path = write_file(tmp_path, "_chat.txt", "\n".join(lines))
    assert said(path) == [("Anna", "2024-03-13", "Seht"), ("Anna", "2024-03-13", "An @Bob alle")]
    assert unread(path) == {"attachments and system lines": 4}


def test_a_note_with_times_is_no_chat(tmp_path):
    for text in (
        "13/03/2024, 22:01 - Walked home\n14/03/2024, 22:01 - Slept\n",
        "Log\n[13/03/24, 22:01:02] Anna: Hi\n",
    ):
        assert len(read_all(write_file(tmp_path, "a.txt", text)).documents) == 1


def test_whatsapps_dates_that_contradict_each_other_are_refused(tmp_path):
    text = "13/03/2024, 22:01 - Anna: Hi\n03/14/2024, 22:01 - Anna: Hi\n"
    assert "dates with the day first and dates with the month first" in refusal(write_file(tmp_path, "a.txt", text))


# ------------------------------------------------------------------------------------------------- ChatGPT and Claude


def chatgpt_message(role: str, *parts, time=1710000000.0, **fields) -> dict:
    content = {"content_type": "text", "parts": list(parts)}
    return {"author": {"role": role}, "create_time": time, "content": content, "recipient": "all"} | fields


def chatgpt_conversation(messages: list[dict | None], **fields) -> dict:
    nodes = {
        f"n{number}": {"id": f"n{number}", "message": message, "parent": f"n{number - 1}" if number else None}
        for number, message in enumerate(messages)
    }
    return {"title": "A title", "mapping": nodes, "current_node": f"n{len(messages) - 1}", "id": "abcdef-1"} | fields


def test_of_chatgpts_conversations_the_branch_that_was_shown_is_read(tmp_path):
    picture = {"content_type": "image_asset_pointer", "asset_pointer": "file"}
    conversation = chatgpt_conversation(
        [
            None,
            chatgpt_message("system", ""),
            chatgpt_message("user", "Hidden.", metadata={"is_visually_hidden_from_conversation": True}),
            chatgpt_message("user", picture, "How long do lentils cook?"),
            chatgpt_message("assistant", "search(lentils)", recipient="browser"),
            chatgpt_message("assistant", "20 minutes.", time=None),
            chatgpt_message("user", "And beans?", time=1710090000.0),
        ]
    )
    conversation["mapping"]["other"] = {"message": chatgpt_message("assistant", "Another answer."), "parent": "n3"}
    path = write_file(tmp_path, "conversations.json", json.dumps([conversation]))
    assert said(path) == [
        ("You", "2024-03-09", "How long do lentils cook?"),
        ("ChatGPT", "2024-03-09", "20 minutes."),
        ("You", "2024-03-10", "And beans?"),
    ]
    assert unread(path) == {"messages of tools and hidden messages": 3, "messages of branches that were not shown": 1}
    [author, _] = read_all(path).authors
    assert author.is_owner


def test_chatgpts_replies_have_no_loss_and_nobody_is_asked_for_a_name(tmp_path):
    messages = [
        None,
        chatgpt_message("user", "Lentils?"),
        chatgpt_message("assistant", "Yes."),
        chatgpt_message("user", "Ok."),
    ]
    path = write_file(tmp_path, "conversations.json", json.dumps([chatgpt_conversation(messages)]))
    for me in ((), "Anna"):
        [document] = read_texts(path, me=me).documents
        assert document.source == "conversations.json, abcdef-1, 2024-03-09"
        learnt = [document.content.messages[turn]["content"] for turn in document.content.turns]
        assert learnt == ["Lentils?", "Ok."]


def test_a_conversation_whose_shown_branch_is_not_known_is_left_out(tmp_path):
    good = chatgpt_conversation([None, chatgpt_message("user", "Good.")])
    unbranched = chatgpt_conversation([None, chatgpt_message("user", "Without branches.")], current_node=None)
    unknown = chatgpt_conversation([None, chatgpt_message("user", "Unknown.")], current_node=None)
    unknown["mapping"]["other"] = {"message": None, "parent": "n0"}
    circle = chatgpt_conversation([chatgpt_message("user", "Circle.")])
    circle["mapping"]["n0"]["parent"] = "n0"
    path = write_file(tmp_path, "conversations.json", json.dumps([good, unbranched, unknown, circle]))
    assert [text for *_, text in said(path)] == ["Good.", "Without branches."]
    reasons = {item.reason for item in read_all(path).left_out}
    assert reasons == {"a conversation that does not say which branch was shown"}


def test_of_claudes_conversations_the_humans_words_are_the_owners(tmp_path):
    messages = [
        {"sender": "human", "text": "Lentils?", "created_at": "2024-03-09T10:00:00.000Z"},
        {
            "sender": "assistant",
            "text": "Yes. [tool]",
            "content": [{"type": "text", "text": "Yes."}, {"type": "tool_use", "name": "search", "input": {}}],
            "created_at": "2024-03-09T10:00:01.000Z",
        },
        {"sender": "human", "text": "", "created_at": "2024-03-09T10:00:02.000Z"},
    ]
    path = write_file(tmp_path, "conversations.json", json.dumps([{"uuid": "abcdef01-2", "chat_messages": messages}]))
    assert said(path) == [("You", "2024-03-09", "Lentils?"), ("Claude", "2024-03-09", "Yes.")]
    assert unread(path) == {"messages without words": 1}


# ------------------------------------------------------------------------------------------ Telegram, Slack and Discord


def telegram_message(number: int, text, **fields) -> dict:
    return {
        "id": number,
        "type": "message",
        "date": f"2024-03-09T10:00:{number:02}",
        "from": "Anna",
        "from_id": "user1",
        "text": text,
        "text_entities": [{"type": "plain", "text": str(text)}],
    } | fields


TELEGRAM = {
    "name": "Bob",
    "type": "personal_chat",
    "id": 42,
    "messages": [
        telegram_message(1, ["Look at ", {"type": "link", "text": "https://example.org"}, " now"]),
        telegram_message(2, "Nice.", **{"from": None, "from_id": "user2"}),
        telegram_message(9, "Older.", from_id=1, date=None, date_unixtime="1710000000"),
        telegram_message(3, "A poem", forwarded_from="Somebody"),
        telegram_message(4, "", photo="photo.jpg"),
        telegram_message(5, "With a picture", photo="photo.jpg"),
        telegram_message(6, "A result", via_bot="@gif"),
        {"id": 7, "type": "service", "date": "2024-03-09T10:00:00", "actor": "Anna", "action": "phone_call"},
        {"id": 8, "type": "service", "date": "2024-03-09T10:00:00", "actor": "Anna", "action": "pin_message"},
    ],
}


def test_telegrams_texts_are_strings_or_lists(tmp_path):
    path = write_file(tmp_path, "result.json", json.dumps(TELEGRAM, indent=1))
    assert said(path) == [
        ("Anna", "2024-03-09", "Look at https://example.org now"),
        ("Deleted account", "2024-03-09", "Nice."),
        ("Anna", "2024-03-09", "Older."),
        ("Anna", "2024-03-09", "With a picture"),
    ]
    assert unread(path) == {
        "forwarded messages": 1,
        "attachments": 1,
        "messages of bots": 1,
        "calls": 1,
        "system lines": 1,
    }


def test_telegrams_export_of_all_chats_says_who_the_owner_is(tmp_path):
    export = {
        "about": "Here is the data",
        "personal_information": {"user_id": 1, "first_name": "Anna", "phone_number": "+49"},
        "contacts": {"list": []},
        "chats": {"about": "This page", "list": [TELEGRAM, TELEGRAM | {"id": 43, "type": "private_group"}]},
    }
    reading = read_all(write_file(tmp_path, "result.json", json.dumps(export)))
    assert reading.exports == ("2 Telegram chats with 2 people, 8 messages",)
    assert [author.is_owner for author in reading.authors] == [True, False]
    assert not reading.chats.need_owner


def slack_message(number: int, text: str, **fields) -> dict:
    return {"type": "message", "user": "U01", "text": text, "ts": f"17100000{number:02}.000100"} | fields


def test_slacks_ids_are_people_and_a_thread_is_a_chat_of_its_own(tmp_path):
    users = [
        {"id": "U01", "name": "anna", "profile": {"display_name": "", "real_name": "Anna A"}},
        {"id": "U02", "name": "bob", "profile": {"display_name": "Bob"}},
    ]
    day = [
        slack_message(1, "<@U02> see <https://example.org|this> in <#C1|garden> &amp; say <!here>"),
        slack_message(2, "Who?", user="U02", thread_ts="1710000002.000100"),
        slack_message(3, "Next"),
        slack_message(4, "Me.", thread_ts="1710000002.000100"),
        slack_message(5, "joined", subtype="channel_join"),
        slack_message(6, "a build", subtype="bot_message", bot_id="B1"),
        slack_message(7, "", files=[{"id": "F1"}]),
        {key: value for key, value in slack_message(8, "", files=[{"id": "F2"}]).items() if key != "text"},
        # As Slack exported files until 2018.
        slack_message(9, "<@U01> uploaded a file: <https://x|a.md>", subtype="file_share", file={}, bot_id=None),
        slack_message(
            10,
            "<@U01> uploaded a file: <https://x|a.md> and commented: our plan",
            subtype="file_share",
            file={"id": "F3", "initial_comment": {"comment": "our plan"}},
            bot_id=None,
        ),
    ]
    write_file(tmp_path, "export/users.json", json.dumps(users))
    write_file(tmp_path, "export/garden/2024-03-09.json", json.dumps(day, indent=4))
    reading = read_all(tmp_path)
    assert reading.exports == ("2 Slack chats with 2 people, 5 messages",)
    assert {author.name for author in reading.authors} == {"Anna A", "Bob"}
    assert unread(tmp_path) == {"messages of bots": 1, "system lines": 1, "attachments": 3}

    channel, thread = (document.content for document in read_texts(tmp_path, me="Anna A").documents)
    assert [message["content"] for message in channel.messages] == [
        "",
        "@Bob see this in #garden & say @here\nNext\nour plan",
    ]
    assert [message["content"] for message in thread.messages] == ["Who?", "Me."]


def test_discords_package_has_the_owners_words_last_ones_first(tmp_path):
    rows = [
        {"ID": 3, "Timestamp": "2024-03-10 08:00:00", "Contents": "Later", "Attachments": ""},
        {"ID": 2, "Timestamp": "2024-03-09 10:00:01", "Contents": "", "Attachments": "https://cdn"},
        {"ID": 1, "Timestamp": "2024-03-09 10:00:00", "Contents": "Hello <:wave:123>", "Attachments": ""},
    ]
    expected = [("You", "2024-03-09", "Hello :wave:"), ("You", "2024-03-10", "Later")]
    path = write_file(tmp_path, "messages/c12/messages.json", json.dumps(rows))
    assert said(path) == expected
    assert unread(path) == {"attachments": 1}
    table = "ID,Timestamp,Contents,Attachments\r\n" + "".join(
        f'{row["ID"]},{row["Timestamp"]},"{row["Contents"]}",{row["Attachments"]}\r\n' for row in rows
    )
    assert said(write_file(tmp_path, "messages/c12/messages.csv", table)) == expected


@pytest.mark.parametrize("end", [0.3, 0.6, 0.9])
def test_what_is_cut_off_is_said_and_nothing_is_invented(tmp_path, end):
    conversations = [chatgpt_conversation([None, chatgpt_message("user", f"Text {n}.")]) for n in range(10)]
    whole = json.dumps(conversations)
    path = write_file(tmp_path, "conversations.json", whole[: int(end * len(whole))])
    texts = [text for *_, text in said(path)]
    assert texts == [f"Text {n}." for n in range(len(texts))]
    assert 0 < len(texts) < 10
    assert [item.reason for item in read_all(path).left_out] == ["not valid JSON (line 1)"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"mapping": 1, "x": {"mapping": {}, "parent": 1}}]', "of ChatGPT of an unknown version"),
        ('[{"uuid": "5", "chat_messages": [{"sender": 3, "text": "Hi."}]}]', "messages of an unknown form: 1"),
        ('{"chat_messages": [], "uuid": 5}', "empty"),
        ('{"date_unixtime": "1", "x": {"messages": [ ', "not valid JSON"),
        ('{"date_unixtime": "1", "messages": [{"type": "message", "from": 3, "text": "Hi."}]}', "an unknown form: 1"),
        ('{"personal_information": {"user_id": 1}}', "a Telegram export of an unknown version"),
        ('[{"type": "message", "ts": "1.2", "text": 5}]', "messages of an unknown form: 1"),
        ('[{"Timestamp": 5, "Contents": "Hi."}]', "in which the owner wrote nothing"),
    ],
)
def test_exports_of_unknown_versions_are_refused_with_a_reason(tmp_path, text, reason):
    assert reason in refusal(write_file(tmp_path, "a.json", text))
