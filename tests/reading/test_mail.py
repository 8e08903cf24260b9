"""Of mails only what their sender wrote is read, after the mail that it answers."""

from email.message import EmailMessage

import pytest
from reading import read_all, read_texts, refusal, write_file


def mail(number: int, text: str, sender="Anna Äbi <anna@example.org>", answers: int | None = None, **headers) -> bytes:
    made = EmailMessage()
    made["From"], made["To"], made["Subject"] = sender, "list@example.org", "Plums"
    made["Date"] = f"Sat, {number:02} Mar 2024 10:00:00 +0100"
    made["Message-ID"] = f"<{number}@example.org>"
    if answers:
        made["In-Reply-To"] = f"<{answers}@example.org>"
    for name, value in headers.items():
        made[name.replace("_", "-")] = value
    made.set_content(text)
    return bytes(made)


def mailbox(*mails: bytes) -> bytes:
    return b"".join(b"From anna@example.org Sat Mar 09 10:00:00 2024\n" + each + b"\n" for each in mails)


def test_the_owners_mails_are_learnt_after_those_that_they_answer(tmp_path):
    box = mailbox(
        mail(1, "Who has plums?\n", sender="bob@example.org (Bob)"),
        mail(2, "I have.\n\nOn Sat, 1 Mar 2024, Bob wrote:\n> Who has plums?\n\n-- \nAnna\n0123\n", answers=1),
        mail(3, "Nobody asked me.\n", sender="Cem <cem@example.org>"),
        mail(4, "By the way, pears too.\n>From the tree.\n", answers=2),
    )
    path = write_file(tmp_path, "Sent.mbox", box)
    assert read_all(path).exports == ("4 mails by 3 people",)
    for me in ("Anna Äbi", "anna@example.org"):
        reading = read_texts(path, me=me)
        first, second = (document.content for document in reading.documents)
        assert first.messages == (
            {"role": "user", "author": "Bob", "content": "Who has plums?"},
            {"role": "assistant", "author": "Anna Äbi", "content": "I have."},
        )
        # Her own words before are learnt once.
        assert [message["content"] for message in second.messages] == ["", "By the way, pears too.\nFrom the tree."]
        assert [item.reason for item in reading.left_out] == ["mails of others: 2"]


def test_a_mail_is_read_from_its_html_if_it_has_no_other_text(tmp_path):
    quote = "<div class=gmail_quote>On 1 Mar 2024 at 10:00 Bob wrote:<blockquote>Who?</blockquote></div>"
    html = f"<p>Plums &amp; pears</p>{quote}"
    made = EmailMessage()
    made["From"] = "anna@example.org"
    made.set_content(html, subtype="html")
    made.add_attachment(b"data", maintype="image", subtype="png", filename="plum.png")
    path = write_file(tmp_path, "a.eml", bytes(made))
    [document] = read_texts(path, me="anna@example.org").documents
    assert document.content.messages[-1]["content"] == "Plums & pears"
    assert [item.reason for item in read_all(path).left_out] == ["attachments: 1"]


def own_words(folder, data: bytes) -> str:
    """What Anna wrote in a mail."""
    [document] = read_texts(write_file(folder, "a.eml", data), me="anna@example.org").documents
    return document.content.messages[-1]["content"]


@pytest.mark.parametrize(
    "rest",
    [
        "> quoted\n> too\n",
        "On Sat, 9 Mar 2024 at 10:00, Bob <bob@example.org> wrote:\n\n> quoted\n",
        "On Sat, 9 Mar 2024 at 10:00, Bob\n<bob@example.org> wrote:\n> quoted\n",
        "Am 09.03.2024 um 10:00 schrieb Bob:\n> quoted\n",
        "09.03.2024 10:00 пользователь Bob написал:\n> quoted\n",
        "Le sam. 9 mars 2024 à 10:00, Bob <bob@example.org> a écrit :\n\nquoted without marks\n",
        "-----Original Message-----\nFrom: Bob\nquoted\n",
        "________________________________\nFrom: Bob\nSent: Saturday\nTo: Anna\nquoted\n",
        "Von: Bob\nGesendet: Samstag\nAn: Anna\nBetreff: Pflaumen\n\nquoted\n",
        "---------- Forwarded message ---------\nFrom: Bob\nquoted\n",
        "-- \nAnna\nGarden street 1\n",
        "_______________________________________________\nPlums mailing list\nplums@example.org\n",
        "-- \nYou received this message because you are subscribed to the group.\n",
        "Sent from my iPhone\n",
        "Von meinem iPhone gesendet\n\nOn Sat, 9 Mar 2024, Bob wrote:\n> quoted\n",
    ],
)
def test_what_others_wrote_and_signatures_are_cut_off(tmp_path, rest):
    text = "Own words: yes.\n\nTwo -- of them."
    assert own_words(tmp_path, mail(1, f"{text}\n\n{rest}")) == text


def test_answers_between_quotes_are_read(tmp_path):
    text = "On 9 Mar 2024, Bob wrote:\n> Plums?\n\nYes.\n\n> Pears?\n\nNo:\nnone.\n"
    assert own_words(tmp_path, mail(1, text)) == "Yes.\n\nNo:\nnone."


def test_lines_of_flowed_text_are_joined(tmp_path):
    data = (
        b"From: anna@example.org\nContent-Type: text/plain; charset=iso-8859-1; format=flowed\n\n"
        b"A line that goes \non and \xf6n.\nAnother.\n> quoted \nOwn.\n"
    )
    assert own_words(tmp_path, data) == "A line that goes on and ön.\nAnother.\nOwn."


def test_a_mail_that_is_attached_is_not_the_senders(tmp_path):
    made = EmailMessage()
    made["From"] = "anna@example.org"
    made.add_attachment(EmailMessage())
    made.get_payload(0).get_payload(0).set_content("Somebody else's words.")
    assert "no mail in which somebody wrote something" in refusal(write_file(tmp_path, "a.eml", bytes(made)))


def test_automatic_and_damaged_mails_are_counted(tmp_path):
    box = mailbox(
        mail(1, "Own."),
        mail(2, "I am away.", Auto_Submitted="auto-replied"),
        mail(3, "> only quoted"),
        b"Subject: nobody\n\ntext\n",
    )
    assert {item.reason for item in read_all(write_file(tmp_path, "a.mbox", box)).left_out} == {
        "automatic mails: 1",
        "mails without own words: 1",
        "mails without a sender: 1",
    }
    assert "no mail in which somebody wrote something" in refusal(write_file(tmp_path, "b.mbox", b"\x00\xff" * 500))


def test_addresses_of_public_archives_are_people(tmp_path):
    data = b"From anna at example.org Sat Mar 9 10:00:00 2024\nFrom: anna at example.org (Anna)\n\nPlums.\n"
    [author] = read_all(write_file(tmp_path, "a.mbox", data)).authors
    assert (author.id, author.name) == ("anna@example.org", "Anna")
