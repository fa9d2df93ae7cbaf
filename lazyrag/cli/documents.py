"""Finding the files to ingest and reading them; whatever cannot be read is named with its reason.

LlamaIndex's own directory reader takes HTML as raw tags and binary data as text and drops bytes
that are not UTF-8 without a word, so files are found, checked and converted here.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from lazyrag.cli.html import html_to_text

TEXT_SUFFIXES = frozenset({".txt", ".md", ".markdown", ".rst"})
HTML_SUFFIXES = frozenset({".html", ".htm"})
PDF_SUFFIXES = frozenset({".pdf"})
SUFFIXES = TEXT_SUFFIXES | HTML_SUFFIXES | PDF_SUFFIXES
READER_VERSION = 1
"""Part of a file's digest: raise it when the text made of the same bytes changes."""


class UnreadableError(Exception):
    """A file cannot be ingested; the text is the reason, without the file's name."""


class EmptyDocumentError(UnreadableError):
    """A file holds no text at all."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read.

    Attributes:
        source: absolute path, the file's identity in the index.
        file_name: what the model and the user see: the path relative to the ingested folder, with
            forward slashes, or the bare name of a file given itself.
    """

    source: str
    file_name: str

    @property
    def path(self) -> Path:
        return Path(self.source)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file or folder left out, and why."""

    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


@dataclass(slots=True)
class Scan:
    """What was found under the paths the user gave.

    Attributes:
        files: supported regular files, sorted, each once.
        roots: the folders that were walked, absolute.
        skipped: what was named or met and cannot be read.
        unsupported: files in folders whose suffix is not one of ours, counted by suffix.
    """

    files: list[SourceFile] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    unsupported: Counter[str] = field(default_factory=Counter)


def scan(paths: Iterable[Path], *, leave_out: Path | None = None) -> Scan:
    """Find the files under ``paths``; hidden ones are passed over, links in folders not followed.

    Args:
        paths: files and folders; a link given here is followed.
        leave_out: a folder that is never entered (the index itself).
    """
    result = Scan()
    seen: set[str] = set()
    left_out = None if leave_out is None else os.path.realpath(leave_out)
    for path in paths:
        shown = printable(str(path))
        try:
            real = os.path.realpath(path, strict=True)
            mode = os.stat(real).st_mode
        except OSError as error:
            result.skipped.append(Skipped(shown, _why(error)))
            continue
        if stat.S_ISDIR(mode):
            result.roots.append(real)
            found: Iterator[SourceFile] = _walk(real, real, left_out, result)
        elif not stat.S_ISREG(mode):
            result.skipped.append(Skipped(shown, "not a regular file"))
            continue
        elif (suffix := _suffix(real)) not in SUFFIXES:
            result.skipped.append(Skipped(shown, _unsupported(suffix)))
            continue
        else:
            found = iter([SourceFile(real, os.path.basename(real))])
        for file in found:
            if file.source in seen:
                continue
            seen.add(file.source)
            if _is_unicode(file.source):
                result.files.append(file)
            else:
                result.skipped.append(
                    Skipped(printable(file.source), "its name is not valid UTF-8; rename it")
                )
    return result


def read_bytes(file: SourceFile) -> bytes:
    """The whole file.

    Raises:
        UnreadableError: the operating system refuses, or the file is empty.
    """
    try:
        data = file.path.read_bytes()
    except OSError as error:
        raise UnreadableError(_why(error)) from error
    if not data:
        raise EmptyDocumentError("empty (0 bytes)")
    return data


def extract_text(data: bytes, suffix: str) -> str:
    """The text of a file's bytes: PDF and HTML converted, line ends made LF, BOM dropped.

    Args:
        data: not empty.
        suffix: lower case with its dot, one of `SUFFIXES`.

    Raises:
        UnreadableError: binary, not UTF-8, encrypted, damaged, or without any text.
    """
    if suffix in PDF_SUFFIXES:
        text = _pdf_text(data)
        nothing = "a PDF without text (scanned pages?); run text recognition on it first"
    else:
        text = _decode(data)
        if suffix in HTML_SUFFIXES:
            text = html_to_text(text)
            nothing = "an HTML page without any visible text"
        else:
            nothing = "nothing but white space"
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = text.encode("utf-8", "replace").decode("utf-8")  # PDFs hold lone surrogates
    if not text.strip():
        raise EmptyDocumentError(nothing)
    return text


def printable(text: str) -> str:
    """``text`` without what a terminal would obey (escape sequences) or cannot encode."""
    encodable = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(
        c if c in "\n\t" or c.isprintable() or unicodedata.category(c) == "Zs" else "\ufffd"
        for c in encodable
    )


def _walk(root: str, folder: str, left_out: str | None, result: Scan) -> Iterator[SourceFile]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        result.skipped.append(Skipped(printable(folder), _why(error)))
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.path == left_out:
            continue
        if entry.is_symlink():
            _check_link(root, entry.path, result)
        elif entry.is_dir(follow_symlinks=False):
            yield from _walk(root, entry.path, left_out, result)
        elif _suffix(entry.name) not in SUFFIXES:
            result.unsupported[_suffix(entry.name) or "no suffix"] += 1
        elif not entry.is_file(follow_symlinks=False):
            result.skipped.append(Skipped(printable(entry.path), "not a regular file"))
        else:
            relative = os.path.relpath(entry.path, root)
            yield SourceFile(entry.path, relative.replace(os.sep, "/"))


def _check_link(root: str, link: str, result: Scan) -> None:
    """A link within the folder leads to what is walked anyway; others are named, not followed."""
    try:
        target = os.path.realpath(link, strict=True)
    except OSError as error:
        result.skipped.append(Skipped(printable(link), _why(error)))
        return
    if target != root and not target.startswith(root.rstrip(os.sep) + os.sep):
        result.skipped.append(
            Skipped(
                printable(link),
                "a symbolic link that leads out of the folder; name its target instead",
            )
        )


def _decode(data: bytes) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UnreadableError("UTF-16 text, not UTF-8; convert it first")
    if b"\x00" in data:
        raise UnreadableError("binary data (NUL bytes), not text")
    if data.startswith(b"%PDF-"):
        raise UnreadableError("a PDF whose name does not end in .pdf; rename it")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableError(
            f"not UTF-8 (byte {data[error.start]:#04x} at offset {error.start:,}); convert it first"
        ) from error


def _pdf_text(data: bytes) -> str:
    if b"%PDF-" not in data[:1024]:
        raise UnreadableError("not a PDF, although its name says so")
    try:
        import pypdf
    except ImportError as error:
        raise UnreadableError("reading PDF needs pypdf: pip install pypdf") from error
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    try:
        reader = pypdf.PdfReader(BytesIO(data))
        if reader.is_encrypted and not _opens_without_password(reader):
            raise UnreadableError("an encrypted PDF; save a copy without its password")
        return "\n\n".join(page.extract_text() for page in reader.pages)
    except UnreadableError:
        raise
    except Exception as error:
        # pypdf lets KeyError, RecursionError and many more out of damaged files.
        raise UnreadableError(f"a damaged PDF ({type(error).__name__})") from error


def _opens_without_password(reader: object) -> bool:
    import pypdf

    assert isinstance(reader, pypdf.PdfReader)
    try:
        return bool(reader.decrypt(""))
    except Exception:
        return False


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _unsupported(suffix: str) -> str:
    kinds = ", ".join(sorted(s[1:] for s in SUFFIXES))
    kind = f"files of type {suffix}" if suffix else "files without a suffix"
    return f"{kind} cannot be read; supported are {kinds}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _why(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "does not exist"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if error.errno == errno.ELOOP:
        return "a symbolic link that leads back to itself"
    return f"cannot be read ({error.strerror or type(error).__name__})"
