"""Writes Word files, as XML of the parts that a test is about."""

import zipfile

NAMES = (
    'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" '
    'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006" '
    'xmlns:v="urn:schemas-microsoft-com:vml" xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
)
STRICT = 'xmlns:w="http://purl.oclc.org/ooxml/wordprocessingml/main"'
BEGIN, SEPARATE, END = (f'<w:r><w:fldChar w:fldCharType="{kind}"/></w:r>' for kind in ("begin", "separate", "end"))
PARTS = ("styles", "numbering", "footnotes", "endnotes")


def write_word(folder, body: str, name: str = "a.docx", names: str = NAMES, **parts: str):
    """Writes a Word file with the given XML in its body and in other parts; `w` is Word's namespace."""
    path = folder / name
    relations = "".join(f'<Relationship Id="{p}" Type="http://x/{p}" Target="{p}.xml"/>' for p in PARTS)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", f"<w:document {names}><w:body>{body}</w:body></w:document>")
        archive.writestr("word/_rels/document.xml.rels", f'<Relationships xmlns="x">{relations}</Relationships>')
        for part, xml in parts.items():
            archive.writestr(f"word/{part}.xml", f"<w:{part} {names}>{xml}</w:{part}>")
    return path


def run(text: str, properties: str = "") -> str:
    return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def paragraph(content: str, properties: str = "") -> str:
    return f"<w:p><w:pPr>{properties}</w:pPr>{content if content.startswith('<') else run(content)}</w:p>"


def cell(content: str, properties: str = "") -> str:
    if content.startswith("<w:tc>"):
        return content
    properties = f"<w:tcPr>{properties}</w:tcPr>" if properties else ""
    return f"<w:tc>{properties}{content if content.startswith('<') else paragraph(content)}</w:tc>"


def row(*cells: str) -> str:
    return f"<w:tr>{''.join(map(cell, cells))}</w:tr>"


def table(*rows: str) -> str:
    return f"<w:tbl>{''.join(rows)}</w:tbl>"


def field(code: str, result: str) -> str:
    return f"{BEGIN}<w:r><w:instrText>{code}</w:instrText></w:r>{SEPARATE}{result}{END}"
