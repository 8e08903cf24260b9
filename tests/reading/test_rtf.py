"""Rich Text files are read as a person sees them."""

import pytest
from pace import at_most
from reading import assert_survives, contents, left_out, read_all, refusal, write_file


def read(folder, body: str | bytes, begin: str = r"{\rtf1\ansi\ansicpg1252\deff0 ") -> str:
    body = body if isinstance(body, bytes) else body.encode("latin-1")
    [text] = contents(write_file(folder, "a.rtf", begin.encode() + body + b"}"))
    return text


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (r"One\par Two\line three\par\par Four", "One\n\nTwo\nthree\n\nFour"),
        ("One\\\nTwo\\\r\n\nThree", "One\n\nTwo\n\nThree"),  # as TextEdit writes
        (r"{\b So}{\i up} \{a\}\~b\\c\_d\-e\tab f", "Soup {a} b\\c-de\tf"),
        (r"\lquote a\rquote\emdash b\ldblquote c\rdblquote", "‘a’—b“c”"),
        (r"{\fonttbl{\f0 Arial;}{\f1\fcharset204 Times;}}\f0 a{\f1 \'e4}\'e4", "aдä"),
        (r"{\fonttbl{\f0\fcharset128 Gothic;}}\f0 \'8d\'a1\'93\'fa", "今日"),
        (r"gr\u246\'f6\u223?er \uc0\u8364 5 \uc2\u20170\'e4\'bb\u8364 ?? x", "größer €5 今€ x"),
        (r"\u-10179?\u-8704? {\uc1\u-10179?}", "😀 \ufffd"),
        (r"{\*\unknown not {\b seen}}{\info{\title not}}a{\header not\par}", "a"),
        (r"{\pict\pngblip 89504e47}a\bin4 }}}}b", "ab"),
        (r"{\field{\*\fldinst HYPERLINK x}{\fldrslt A link}} here", "A link here"),
        (r"Soup{\super\chftn}{\footnote\pard {\super\chftn} Of\par Bob} is", "Soup[^1] is\n\n[^1]: Of Bob"),
        (r"{\listtext\'b7\tab}salt\par{\listtext 2.\tab}oil\par\pard end", "- salt\n2. oil\n\nend"),
        (r"{\*\pn\pnlvlbody}{\pntext 1.\tab}salt\par", "1. salt"),
        (r"\trowd\intbl a\cell b\par c\cell\row\trowd\intbl\cell d\cell\row\pard e\par", "a | b c\nd\n\ne"),
        (r"{\*\shppict{\*\shpinst}}{\shp{\*\shpinst{\sp{\sn a}{\sv b}}{\shptxt Boxed\par}}}", "Boxed"),
        (r"{\loch\f0\*\cs7\cf0\rtlch The oven} is {\b \*\unknown old}", "The oven is old"),
        (r"a{\*\cs7 b}{\*\b c}{\*\rtlch\ltrch d}{" + "\n" + r"\*" + "\n" + r"\unknown no}{\*\unknown\cs7 no}", "abcd"),
        (r"{\*\expndtw4 a}{\*\ql b}{\*\charscalex90 c}{\*\ulnone d}{\*\htmltag64 no}{\*\bkmkstart no}", "abcd"),
        (r"{\upr{Sch?n}{\*\ud{Sch\u246?n}}} so {\upr{a{\b b}}{\*\ud cd}}{\info{\upr{no}{\*\ud no}}}", "Schön so cd"),
        (r"a{\*\footnote\pard b\par}", "a[^1]\n\n[^1]: b"),
        (r"{\*\do\dobxpage\dptxbx{\dptxbxtext\pard Boxed\par}\dpx10}", "Boxed"),
        (r"{\shp{\*\shpinst{\shptxt Boxed\par}}{\shprslt{\*\do\dptxbx{\dptxbxtext Boxed\par}}}}", "Boxed"),
        (
            r"{\mmath{\*\moMathPara{\moMathParaPr{\mctrlPr}}{\*\moMath{\mf{\mfPr{\mtype bar}}{\mnum{\mr a}}"
            r"{\mden{\mr b}}}{\md{\mdPr{\mbegChr (}}{\me{\msSup{\me{\mr x}}{\msup{\mr 2}}}}}}}{\mmathPict{\pict 00}}}",
            "a/b(x^2)",
        ),
        (
            r"{\mmath{\*\moMath{\mnary{\mnaryPr{\mchr\u8721?}{\mlimLoc x}}{\msub{\mr i}}{\msup}{\me{\mr f}}}"
            r"{\mnary{\mnaryPr{\mgrow on}}{\msub}{\msup}{\me{\mr g}}}}}",
            "∑_if∫g",
        ),
        (
            r"{\fonttbl{\f0 Arial;}{\f3\froman\fcharset2{\*\panose 05}Symbol{\*\falt x};}{\f4\fcharset2 Wingdings;}}"
            r"\f0 A {\f3\'de} B {\f3 b\u-3999?\u-3874?}{\f4\'e0 }{\listtext\f4\'fc\tab}b\u-3999?",
            "- A ⇒ B βα⇒→ b\uf061",
        ),
    ],
)
def test_text_is_read(tmp_path, body, expected):
    assert read(tmp_path, body) == expected


@pytest.mark.parametrize(
    ("begin", "expected"),
    [
        (r"{\rtf1\mac ", "Äé"),
        (r"{\rtf1\ansi\ansicpg1251 ", "ЂЋ"),
        (r"{\rtf1\ansi\ansicpg99999 ", "€Ž"),
        (r"{\rtf1\pc ", "ÇÄ"),
    ],
)
def test_code_pages_are_those_of_the_file(tmp_path, begin, expected):
    assert read(tmp_path, r"\'80\'8e", begin) == expected


def test_hidden_and_deleted_text_is_not_learnt(tmp_path):
    body = r"Seen {\v secret}{\deleted\revauth1 gone}\v x\v0 and\v y\plain  on{\*\annotation secret}{\annotation no}"
    assert read(tmp_path, body) == "Seen and on"
    assert [item.reason for item in read_all(tmp_path).left_out if "words" not in item.reason] == [
        "comments: 2",
        "hidden and deleted texts: 4",
    ]


def test_a_cut_file_says_so(tmp_path):
    path = write_file(tmp_path, "a.rtf", r"{\rtf1{\b Soup")
    assert contents(path) == ["Soup"]
    assert left_out(path) == {"a.rtf": "the end, since the file is cut off"}
    path = write_file(tmp_path, "b.rtf", r"{\rtf1 Soup} and more")
    assert left_out(path) == {"b.rtf": "all after the end of the first text in the file"}


@pytest.mark.parametrize("data", [b"{\\html", b"Soup", b"\x00\x01"])
def test_what_is_no_rich_text_is_refused(tmp_path, data):
    assert "damaged, or not a Rich Text file" in refusal(write_file(tmp_path, "a.rtf", data))


def test_groups_are_not_nested_without_end(tmp_path):
    assert "its groups are nested more than 1,000 deep" in refusal(
        write_file(tmp_path, "a.rtf", "{\\rtf1" + "{" * 9000)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece", ["{}", "\\'e4", "\\u1 ", "\\par", "a\\cell", "{\\v", "\\", "{\\footnote a}", "\\bin9"]
)
def test_reading_takes_linear_time(tmp_path, piece):
    path = write_file(tmp_path, "a.rtf", "{\\rtf1 " + piece * (300_000 // len(piece)))
    with at_most(3):
        reasons = {item.reason for item in read_all(path).left_out}
    assert any("cut off" in reason or "nested" in reason for reason in reasons)


def test_damaged_files_are_read_in_part_or_refused(folder):
    whole = rb"{\rtf1\ansi{\fonttbl{\f0\fcharset0 A;}}\f0 Soup \'e4\u8364?\par{\footnote a}\trowd\intbl b\cell\row}"
    assert_survives(folder, "a.rtf", whole)


def test_signs_that_unicode_does_not_have_are_counted(tmp_path):
    assert read(tmp_path, r"{\fonttbl{\f3 Symbol;}}a{\f3\u-3856?\u-3841?}{\v\f3\u-3856?}") == "a"
    assert [item.reason for item in read_all(tmp_path).left_out if "words" not in item.reason] == [
        "hidden and deleted texts: 1",
        "signs without an equivalent in Unicode: 2",
    ]
