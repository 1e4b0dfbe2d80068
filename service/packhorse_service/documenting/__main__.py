"""``python -m packhorse_service.documenting docs/*.md``: write the blocks of these pages anew."""

import sys
from pathlib import Path

from packhorse_service.documenting import filled

for page in map(Path, sys.argv[1:]):
    page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
