"""The status page as a file; what it shows is in ``tests/browser``."""

from __future__ import annotations

import re

from packhorse_service.monitoring.status_page import page

OF_SVG = "http://www.w3.org/2000/svg"  # the name of its elements, which nobody asks for


def test_the_page_is_one_file_that_needs_nothing_from_elsewhere() -> None:
    text = page().decode()
    assert text.startswith("<!doctype html>")
    assert not re.findall(r"https?://[^\s'\"]+", text.replace(OF_SVG, ""))
    assert not re.findall(r"""\bsrc=|<link(?! rel="icon" href="data:)|@import|\bimport\b|url\((?!#)""", text)
    assert "/* style */" not in text
    assert "/* script */" not in text
    assert len(text) < 64 << 10


def test_its_script_makes_no_markup_and_runs_no_text() -> None:
    script = page().decode().partition("<script type")[2]
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert unsafe not in script
    assert script.count("</script") == 1
