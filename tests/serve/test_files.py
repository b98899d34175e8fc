"""Files are translated where they have text, and stay what they are."""

from __future__ import annotations

import io
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgen_serve.errors import BadRequest, Busy
from fastgen_serve.translation import files, office
from fastgen_serve.translation.downloads import Downloads
from fastgen_serve.translation.sentences import Piece

WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
SLIDE = 'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"'
OPEN = 'xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0" xmlns:office="o"'


def archive(parts: dict[str, str | bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as made:
        for name, content in parts.items():
            made.writestr(name, content, zipfile.ZIP_STORED if name == "mimetype" else method)
    return out.getvalue()


def part(data: bytes, name: str) -> str:
    with zipfile.ZipFile(io.BytesIO(data)) as made:
        assert made.testzip() is None
        return made.read(name).decode()


def in_capitals(data: bytes, ending: str) -> bytes:
    document = files.read(data, ending)
    return document.write(
        [Piece(piece.text.upper(), True) if piece.is_sentence else piece for piece in document.pieces]
    )


def docx(body: str) -> bytes:
    return archive({"[Content_Types].xml": "<Types/>", "word/document.xml": f"<w:document {WORD}>{body}</w:document>"})


@pytest.mark.parametrize(
    ("ending", "data", "expected"),
    [
        (".txt", "one. Two\n\nthree ä\n".encode(), "ONE. TWO\n\nTHREE Ä\n".encode()),
        (".txt", "\ufeffone\r\n".encode(), b"ONE\r\n"),
        (".txt", "one ä".encode("utf-16"), "ONE Ä".encode()),
        (".html", b"<p class=a>one &amp; two</p>", b"<p class=a>ONE &amp; TWO</p>"),
        (
            ".srt",
            b"1\n00:00:01,000 --> 00:00:02,000\none\ntwo\n\n2\n00:00:03,000 --> 00:00:04,500\n- Yes. Or?\n- no\n",
            b"1\n00:00:01,000 --> 00:00:02,000\nONE TWO\n\n2\n00:00:03,000 --> 00:00:04,500\n- YES. OR?\n- NO\n",
        ),
        (
            ".srt",
            b"00:01 --> 00:02\n  one \t\n two  \n \xe2\x80\x93 three\n",
            b"00:01 --> 00:02\nONE TWO\n\xe2\x80\x93 THREE\n",
        ),
        (".srt", b"1\r\n00:00:01,000 --> 00:00:02,000\r\none", b"1\n00:00:01,000 --> 00:00:02,000\nONE"),
    ],
)
def test_files_of_text(ending, data, expected):
    assert in_capitals(data, ending) == expected


def test_a_paragraph_of_a_word_document_is_one_text_where_it_looks_the_same():
    run = '<w:r w:rsidR="1"><w:rPr><w:lang w:val="en"/></w:rPr><w:t xml:space="preserve">{}</w:t></w:r>'
    bold = "<w:r><w:rPr><w:b/></w:rPr><w:t>{}</w:t></w:r>"
    body = (
        "<w:p><w:pPr><w:rPr><w:b/></w:rPr></w:pPr>"
        + run.format("one ")
        + '<w:proofErr w:type="spellStart"/>'
        + run.format("two. ")
        + bold.format("three")
        + "<w:r><w:t>four</w:t><w:br/><w:t>five &amp; six</w:t></w:r><w:r><w:t/></w:r></w:p><!-- a -->"
    )
    document = files.read(docx(body), ".docx")
    assert [piece.text for piece in document.pieces if piece.is_sentence] == ["one two.", "three", "four", "five & six"]
    made = part(in_capitals(docx(body), ".docx"), "word/document.xml")
    keep = '<w:t xml:space="preserve">'
    expected = body.replace("one ", "ONE TWO. ").replace("two. ", "").replace("<w:t>", keep)
    for word in ("three", "four", "five &amp; six"):
        expected = expected.replace(word, word.upper().replace("AMP", "amp"))
    assert made == f"<w:document {WORD}>{expected}</w:document>"


def test_what_is_not_replaced_stays_byte_for_byte():
    start = f'<?xml version="1.0"?>\n<w:document {WORD} mc:Ignorable="w14"  xmlns:mc="m">'
    text = f"{start}<w:p a='>'><w:r><w:t>1</w:t></w:r></w:p></w:document>"
    parts = {
        "word/document.xml": "\ufeff" + text,
        "word/media/image1.png": b"\x89PNG\x00",
        "word/styles.xml": "<a>b</a>",
    }
    made = in_capitals(archive(parts), ".docx")
    assert part(made, "word/styles.xml") == "<a>b</a>"
    assert part(made, "word/document.xml").replace('<w:t xml:space="preserve">', "<w:t>") == "\ufeff" + text


def test_slides_and_open_documents():
    runs = '<a:r><a:rPr lang="en" dirty="0"/><a:t>one </a:t></a:r><a:r><a:rPr lang="en"/><a:t>two</a:t></a:r>'
    slide = f'<p:sld xmlns:p="p" {SLIDE}><a:p>{runs}</a:p></p:sld>'
    made = part(in_capitals(archive({"ppt/slides/slide1.xml": slide}), ".pptx"), "ppt/slides/slide1.xml")
    assert made == slide.replace("one ", "ONE TWO").replace(">two<", "><")
    paragraph = "<text:p>one\n  <text:span>two</text:span><text:tab/>three<![CDATA[x]]></text:p>"
    text = f"<office:text {OPEN}><text:h>head</text:h>{paragraph}four</office:text>"
    data = archive({"mimetype": "application/vnd.oasis.opendocument.text", "content.xml": text})
    made = in_capitals(data, ".odt")
    expected = text.replace("head", "HEAD").replace("one\n  ", "ONE ").replace("two", "TWO").replace("three", "THREE")
    assert part(made, "content.xml") == expected
    with zipfile.ZipFile(io.BytesIO(made)) as opened:
        first = opened.infolist()[0]
        assert (first.filename, first.compress_type) == ("mimetype", zipfile.ZIP_STORED)


@given(st.text(max_size=40))
def test_a_translation_is_no_markup_of_a_document(text):
    document = files.read(docx("<w:p><w:r><w:t>one</w:t></w:r></w:p>"), ".docx")
    read = files.read(document.write([Piece(f"a {text}", True)]), ".docx")
    kept = "".join(piece.text for piece in read.pieces)
    assert kept.split() == office._NOT_XML.sub("", f"a {text}").split()


def test_documents_that_would_be_large_are_refused_before_they_are_read(monkeypatch):
    monkeypatch.setattr(office, "MOST_BYTES", 1000)
    monkeypatch.setattr(office, "MOST_FILES", 3)
    with pytest.raises(BadRequest, match="1000 bytes unpacked"):
        files.read(docx("<w:p/>" + " " * 2000), ".docx")
    with pytest.raises(BadRequest, match="more than 3 parts"):
        files.read(archive(dict.fromkeys("abcd", "")), ".docx")
    # One that says it is smaller than it is.
    data = bytearray(docx("<w:p/>" + " " * 2000))
    for position in range(len(data) - 4):
        if int.from_bytes(data[position : position + 4], "little") == 2000 + len(
            f"<w:document {WORD}><w:p/></w:document>"
        ):
            data[position : position + 4] = (100).to_bytes(4, "little")
    with pytest.raises(BadRequest, match="damaged"):
        files.read(bytes(data), ".docx")


ENTITIES = '<!DOCTYPE a [<!ENTITY b "bbbb"><!ENTITY c "&b;&b;">]>'


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "damaged"),
        (b"PK\x03\x04 no archive", "damaged"),
        (archive({"word/document.xml": f"{ENTITIES}<w:document {WORD}><w:p>&c;</w:p></w:document>"}), "document type"),
        (archive({"word/document.xml": "<w:p><w:p>"}), "damaged"),
        (archive({"word/document.xml": f"<w:document {WORD}><w:p/></w:document>".encode("utf-16")}), "damaged"),
        (archive({"word/document.xml": "<a/>"}, zipfile.ZIP_BZIP2), "compressed in a way"),
        (docx("<w:p/>")[:-30], "damaged"),
    ],
)
def test_damaged_documents_are_refused(data, reason):
    with pytest.raises(BadRequest, match=reason) as found:
        files.read(data, ".docx")
    assert found.value.param == "file"


def test_text_in_another_encoding_is_refused():
    with pytest.raises(BadRequest, match="UTF-8"):
        files.read("ä".encode("latin-1"), ".txt")


def test_no_archive_writes_to_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = archive({"../../evil.txt": "x", "/abs": "y", "word/document.xml": f"<w:document {WORD}/>"})
    made = in_capitals(data, ".docx")
    with zipfile.ZipFile(io.BytesIO(made)) as opened:
        assert opened.read("../../evil.txt") == b"x"
    assert not list(tmp_path.iterdir())


def test_downloads_go_after_a_while_and_have_a_limit():
    now = 0.0
    downloads = Downloads(life=10, most=10, now=lambda: now)
    name = downloads.add(b"12345678", ".txt")
    assert name.endswith(".txt") and len(name) > 30
    assert downloads.get(name) == b"12345678"
    assert downloads.get("other.txt") is None
    with pytest.raises(Busy):
        downloads.add(b"123", ".txt")
    now = 10.0
    assert downloads.get(name) is None
    assert downloads.get(downloads.add(b"123", ".txt")) == b"123"


def test_no_file_takes_quadratic_time():
    spaces = b"1\n00:00:01,000 --> 00:00:02,000\na" + b" " * 400_000 + b"b\n"
    assert in_capitals(spaces, ".srt") == spaces.replace(b"a", b"A").replace(b"b", b"B")  # within a test's time limit
    lines = docx("<w:p><w:r><w:t>one" + "\n" * 400_000 + "two</w:t></w:r></w:p>")
    assert [piece.text for piece in files.read(lines, ".docx").pieces if piece.is_sentence] == ["one", "two"]


@pytest.mark.parametrize("ending", [".txt", ".html", ".srt"])
def test_files_with_more_sentences_than_a_request_may_have_are_refused(ending):
    cue = "00:00:01,000 --> 00:00:02,000\n" if ending == ".srt" else ""
    with pytest.raises(BadRequest, match="100000 pieces"):
        files.read((cue + "Yes. " * 50_001).encode(), ending)


PARAGRAPH = "<w:p><w:r><w:t>Yes. No.</w:t></w:r></w:p>"


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"word/document.xml": "<w:p>" + " " * 8 * 2**20}, "8388608 bytes unpacked"),
        (dict.fromkeys(("word/document.xml", "word/footnotes.xml"), " " * 5 * 2**20), "8388608 bytes unpacked"),
        # What follows is damaged: it is not read.
        ({"word/document.xml": "<w:p>" + "<a/>" * 500_000 + "</w:p"}, "500000 elements"),
        ({"word/document.xml": "<w:p><w:t>" + "a\n" * 260_000 + "</w:p"}, "500000 elements"),
        (
            dict.fromkeys(
                ("word/document.xml", "word/header1.xml"), f"<w:document {WORD}>{PARAGRAPH * 20_000}</w:document>"
            ),
            "100000 pieces",
        ),
    ],
)
def test_documents_with_more_text_than_a_request_may_have_are_refused(parts, reason):
    with pytest.raises(BadRequest, match=reason):
        files.read(archive(parts), ".docx")
