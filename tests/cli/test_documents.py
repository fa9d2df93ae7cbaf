"""What is read, what is skipped, and with which words."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path

import pytest

from lazyrag.cli import encode
from lazyrag.cli.documents import (
    EmptyDocumentError,
    SourceFile,
    UnreadableError,
    extract_text,
    printable,
    read_bytes,
    scan,
)
from lazyrag.cli.html import html_to_text


def pdf(text: str = "", *, password: str = "") -> bytes:
    """A one-page PDF, by hand, so that the test needs no writer of fonts."""
    from pypdf import PdfReader, PdfWriter

    stream = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 200] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    data, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    data += b"xref\n0 6\n0000000000 65535 f \n%strailer\n<< /Size 6 /Root 1 0 R >>\n" % table
    data += b"startxref\n%d\n%%%%EOF" % data.index(b"xref\n")
    if not password:
        return data
    writer = PdfWriter(PdfReader(BytesIO(data)))
    writer.encrypt(password, algorithm="RC4-128")
    out = BytesIO()
    writer.write(out)
    return out.getvalue()


GOOD = [
    pytest.param(b"plain", ".txt", "plain", id="txt"),
    pytest.param(b"\xef\xbb\xbfwith mark", ".md", "with mark", id="bom"),
    pytest.param(b"a\r\nb\rc\n", ".rst", "a\nb\nc\n", id="line-ends"),
    pytest.param("ünïcödé 🤗 한".encode(), ".txt", "ünïcödé 🤗 한", id="utf8"),
    pytest.param(pdf("Hello from a PDF"), ".pdf", "Hello from a PDF", id="pdf"),
    pytest.param(b"<p>one</p><p>two &amp; three</p>", ".html", "one\n\ntwo & three", id="html"),
]


@pytest.mark.parametrize(("data", "suffix", "text"), GOOD)
def test_text_of_good_files(data: bytes, suffix: str, text: str) -> None:
    assert extract_text(data, suffix) == text


BAD = [
    pytest.param(b" \n\t ", ".txt", "nothing but white space", id="blank"),
    pytest.param(b"\x89PNG\x00\x01", ".txt", "binary data", id="binary"),
    pytest.param(b"caf\xe9", ".md", r"not UTF-8 \(byte 0xe9 at offset 3\)", id="latin-1"),
    pytest.param("text".encode("utf-16"), ".txt", "UTF-16", id="utf-16"),
    pytest.param(b"<script>x</script>", ".html", "without any visible text", id="empty-html"),
    pytest.param(b"no pdf at all", ".pdf", "not a PDF", id="false-pdf"),
    pytest.param(b"%PDF-1.7\n" + bytes(range(256)), ".pdf", "a damaged PDF", id="damaged-pdf"),
    pytest.param(pdf("cut short")[:300], ".pdf", "PDF", id="cut-pdf"),
    pytest.param(pdf(), ".pdf", "a PDF without text", id="scanned-pdf"),
    pytest.param(pdf("secret", password="x"), ".pdf", "encrypted PDF", id="encrypted-pdf"),
    pytest.param(pdf("x"), ".txt", "PDF whose name does not end", id="pdf-called-txt"),
]


@pytest.mark.parametrize(("data", "suffix", "reason"), BAD)
def test_reason_of_bad_files(data: bytes, suffix: str, reason: str) -> None:
    with pytest.raises(UnreadableError, match=reason):
        extract_text(data, suffix)


def test_empty_file_is_told_from_an_unreadable_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(EmptyDocumentError, match="0 bytes"):
        read_bytes(SourceFile(str(tmp_path / "a.txt"), "a.txt"))
    with pytest.raises(UnreadableError, match="does not exist"):
        read_bytes(SourceFile(str(tmp_path / "b.txt"), "b.txt"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_forbidden_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt").chmod(0)
    (tmp_path / "closed").mkdir(mode=0)
    found = scan([tmp_path])
    (tmp_path / "closed").chmod(0o700)
    assert [skipped.reason for skipped in found.skipped] == ["no permission to read it"]
    with pytest.raises(UnreadableError, match="no permission"):
        read_bytes(found.files[0])


def test_walk_names_counts_and_passes_over(tmp_path: Path) -> None:
    root = tmp_path / "docs"
    for name in ("b.md", "sub/a.TXT", ".hidden.md", ".git/x.md", "pic.png", "two.png", "README"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    os.mkfifo(root / "pipe.txt")
    index = root / "index"
    index.mkdir()
    (index / "inside.txt").write_text("x")
    found = scan([root], leave_out=index)
    assert [file.file_name for file in found.files] == ["b.md", "sub/a.TXT"]
    assert found.files[1].source == str(root.resolve() / "sub/a.TXT")
    assert dict(found.unsupported) == {".png": 2, "no suffix": 1}
    assert [str(skipped) for skipped in found.skipped] == [
        f"{root.resolve()}/pipe.txt: not a regular file"
    ]


def test_links_are_followed_only_where_the_user_points(tmp_path: Path) -> None:
    root = tmp_path / "docs"
    root.mkdir()
    (root / "a.md").write_text("x")
    (tmp_path / "outside.md").write_text("x")
    (root / "b.md").symlink_to(root / "a.md")
    (root / "up").symlink_to(root)
    (root / "loop.md").symlink_to(root / "loop.md")
    (root / "out.md").symlink_to(tmp_path / "outside.md")
    (root / "dead.md").symlink_to(root / "gone.md")
    found = scan([root])
    assert [file.file_name for file in found.files] == ["a.md"]
    reasons = {Path(skipped.file).name: skipped.reason for skipped in found.skipped}
    assert reasons["dead.md"] == "does not exist"
    assert reasons["loop.md"] == "a symbolic link that leads back to itself"
    assert "leads out of the folder" in reasons["out.md"]
    assert set(reasons) == {"dead.md", "loop.md", "out.md"}
    assert [file.source for file in scan([root / "out.md"]).files] == [
        str(tmp_path.resolve() / "outside.md")
    ]


def test_paths_given_twice_or_wrongly(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("x")
    (tmp_path / "a.xlsx").write_text("x")
    found = scan([tmp_path / "a.md", tmp_path, tmp_path / "a.xlsx", tmp_path / "no.md"])
    assert [file.file_name for file in found.files] == ["a.md"]
    assert [skipped.reason.split(";")[0] for skipped in found.skipped] == [
        "files of type .xlsx cannot be read",
        "does not exist",
    ]


def test_name_that_is_not_unicode(tmp_path: Path) -> None:
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.md")).write_text("x")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    found = scan([tmp_path])
    assert not found.files
    assert "not valid UTF-8" in found.skipped[0].reason
    found.skipped[0].file.encode("utf-8")


def test_html_text_is_what_a_reader_sees() -> None:
    page = """<html><head><title>Title</title><style>p {x}</style></head><body>
      <h1>Head</h1><p>A <b>bold</b>\n word,<br>new line</p><ul><li>one</li><li>two</li></ul>
      <script>if (1 < 2) {}</script><pre>a\n  b</pre><table><tr><td>1</td><td>2</td></tr></table>
      <p>&lt;b&gt; &eacute;</p>"""
    assert html_to_text(page).split("\n") == [
        "Title", "", "Head", "", "A bold word,", "new line", "", "one", "two", "",
        "a", "  b", "", "1  2", "", "<b> é",
    ]  # fmt: skip


def test_deeply_nested_html_is_no_problem() -> None:
    assert html_to_text("<div>" * 20_000 + "deep") == "deep"


def test_printable_disarms_the_terminal() -> None:
    assert printable("a\x1b[31mb\r\tc\n\u202e d") == "a\ufffd[31mb\ufffd\tc\n\ufffd d"


@pytest.mark.parametrize("mark", ["\n\n", "\n", " ", ""])
def test_a_long_text_is_cut_in_parts_that_are_the_text(mark: str):
    """Between paragraphs, lines or words, where there are any."""
    word = "A sentence about foxes." + mark
    text = word * (1 + 3 * encode.MOST_CHARACTERS // len(word))
    parts = list(encode.parts_of(text))
    assert "".join(parts) == text and 4 <= len(parts) <= 7
    assert all(0 < len(part) <= encode.MOST_CHARACTERS for part in parts)
    assert not mark or all(part.endswith(mark) for part in parts[:-1])
    assert list(encode.parts_of("short")) == ["short"] and list(encode.parts_of("")) == [""]
