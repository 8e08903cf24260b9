"""Texts in the encodings before Unicode are read; what is damaged or no text is left out."""

import random

import pytest
from reading import contents, left_out, write_file

TEXTS = {
    "cp1252": "Smörgås på bordet – det är en fin dag i Göteborg. It’s a “fine” day.",
    "latin-1": "L'été à la plage, c'était très agréable, où êtes-vous ?",
    "cp1250": "Příliš žluťoučký kůň. Dnes je hezky a šli jsme na procházku.",
    "cp1251": "Сегодня хорошая погода, мы пошли гулять.",
    "koi8_r": "Сегодня хорошая погода, мы пошли гулять.",
    "cp1253": "Καλημέρα κόσμε, τι κάνετε σήμερα;",
    "cp932": "今日は天気がいいので散歩に行きました。日記を書く。",
    "euc_jp": "今日は天気がいいので散歩に行きました。日記を書く。",
    "gb18030": "今天天气很好,我们去散步了。写日记。",
    "big5": "今天天氣很好,我們去散步了。寫日記。",
    "cp949": "오늘은 날씨가 좋아서 산책을 갔습니다.",
    "cp1254": "Bugün hava çok güzel, şehirde yürüyüşe çıktık ve günlüğe yazdık.",
    "cp1255": "היום מזג האוויר יפה והלכנו לטייל בעיר.",
}


@pytest.mark.parametrize("encoding", TEXTS)
@pytest.mark.parametrize("repeats", [1, 10])
def test_encodings_before_unicode_are_detected(tmp_path, encoding, repeats):
    text = "\n".join([TEXTS[encoding]] * repeats)
    assert contents(write_file(tmp_path, "a.txt", text.encode(encoding))) == [text]


@pytest.mark.parametrize(
    "text", ["It’s a “fine” day – at last…", "Tea for £5 a cup.", "Paint at 20 °C, ½ a pot: €3 ± 1"]
)
@pytest.mark.parametrize(("name", "before"), [("a.txt", ""), ("a.html", "<body><p>"), ("b.html", "<meta name=x>")])
def test_english_with_signs_but_no_letter_beyond_ascii_is_read(tmp_path, text, name, before):
    assert contents(write_file(tmp_path, name, (before + text).encode("cp1252"))) == [text]


@pytest.mark.parametrize("text", ["It’s here.", "The “quoted” text…", "It’s late — and costs €5.", "Tea is €5."])
@pytest.mark.parametrize("name", ["a.txt", "a.html"])
def test_english_signs_of_old_macs_are_not_taken_for_letters(folder, text, name):
    write_file(folder, name, (text * 9).encode("mac_roman"))
    assert left_out(folder)[name].startswith("not UTF-8")


def test_a_slip_among_accents_leaves_nothing_out(tmp_path):
    text = "L'été à la plage, c'était agréable, leÉtat. " * 2 + TEXTS["latin-1"] * 9
    assert contents(write_file(tmp_path, "a.txt", text.encode("latin-1"))) == [text]


@pytest.mark.parametrize(
    "text", ["<meta charset=iso-8859-2><p>Są tu", '<?xml version="1.0" encoding="iso-8859-2"?><p>Są tu']
)
def test_a_page_is_read_in_the_encoding_that_it_names_though_signs_would_fit(tmp_path, text):
    assert contents(write_file(tmp_path, "a.html", text.encode("iso-8859-2"))) == ["Są tu"]


@pytest.mark.parametrize("text", ["Łódź", "Była Łódź", "Dała mu Łasicę"])
def test_polish_letters_are_not_taken_for_signs(tmp_path, text):
    assert contents(write_file(tmp_path, "a.txt", text.encode("cp1250"))) == [text]


@pytest.mark.slow
def test_an_encoding_is_detected_by_the_lines_beyond_ascii(tmp_path):
    text = "\n".join(["Plain English. " * 5] * 20_000 + [TEXTS["cp1251"]] * 5)
    assert contents(write_file(tmp_path, "a.md", text.encode("cp1251"))) == [text]


def test_utf8_with_a_few_broken_bytes_is_left_out_not_read_as_something_else(folder):
    data = ("日記を書く。" * 20).encode()
    write_file(folder, "a.txt", data + b"\xe6\x97" + data)
    assert left_out(folder) == {"a.txt": f"not UTF-8 (byte {len(data)}); save it as UTF-8 to use it"}


def test_bytes_that_are_no_text_are_left_out(folder):
    write_file(folder, "a.txt", random.Random(0).randbytes(5000).replace(b"\0", b""))
    assert left_out(folder)["a.txt"].startswith("not UTF-8")
