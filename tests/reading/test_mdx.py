"""Markdown with components keeps its Markdown."""

import pytest
from reading import contents, left_out, read_all, write_file


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("import A from './a.js'\nimport {\n  B,\n  C\n} from 'b';\nimport 'c'\n\n# Soup", "# Soup"),
        ("export const a = {\n  b: `c`,\n\n  d: [1]\n}\n\n# Soup\n\nexport taxes", "# Soup\n\nexport taxes"),
        ("---\ntitle: x\n---\n\n# Soup", "# Soup"),
        (
            '<Tabs a="b > c">\n  <Tab d={{e: "f"}} g>\n\nSalt *and* <b>oil</b>\n\n  </Tab>\n</Tabs>\nEnd',
            "\nSalt *and* oil\n\nEnd",
        ),
        ("Hello {props.name}, {'you'} and{' '}me {/* unread */}!", "Hello , you and me !"),
        ("One,\n{' '}\n{`two`} {\"{three}\"}\n<B>{\n'four'\n}</B>", "One,\ntwo \nfour"),
        ("<!-- unread -->\n# Soup", "# Soup"),
        ("`<Tab>{a}</Tab>`\n\n```jsx\nimport A from 'a'\n<Tab a={b}/>\n```\n<Tab>\n```\n{c}\n```\n</Tab>",
         "`<Tab>{a}</Tab>`\n\n```jsx\nimport A from 'a'\n<Tab a={b}/>\n```\n```\n{c}\n```"),
        (r"\{a\} \<b> 1 < 2 <3 a<b {", r"\{a\} \<b> 1 < 2 <3 a<b {"),
        ("important news\nimport duties rise, says 'Bob'", "important news\nimport duties rise, says 'Bob'"),
        ("    indented <B/>text", "indented text"),
        ("<>größer</> 今日は <A.B c:d='e'/>", "größer 今日は"),
    ],
)  # fmt: skip
def test_markdown_is_kept_and_the_rest_is_left_out(tmp_path, written, read):
    assert contents(write_file(tmp_path, "a.mdx", written)) == [read.strip("\n")]


def test_what_is_left_out_is_counted(tmp_path):
    text = "import A from 'a'\n\nexport const b = 1\n\n<A b={b}>One</A> {b} {/* c */} <!-- d -->"
    reading = read_all(write_file(tmp_path, "a.mdx", text))
    assert [item.reason for item in reading.left_out] == [
        "tags of components: 2",
        "expressions: 1",
        "imports and exports: 2",
        "comments: 2",
    ]
    assert left_out(write_file(tmp_path, "b.mdx", "# Soup")) == {}
