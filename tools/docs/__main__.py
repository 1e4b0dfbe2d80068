"""``python -m tools.docs docs/*.md``: write the blocks of these pages anew."""

import sys
from pathlib import Path

from tools.docs import filled

for page in map(Path, sys.argv[1:]):
    page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
