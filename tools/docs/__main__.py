"""``python -m tools.docs docs/*.md``: write the blocks of these pages anew, and the pictures in modules."""

import sys
from pathlib import Path

from tools.docs import PICTURES, filled
from tools.docs.state_pictures import redrawn

for page in map(Path, sys.argv[1:]):
    page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
for module, picture in PICTURES.items():
    module.write_text(redrawn(module.read_text(encoding="utf-8"), picture()), encoding="utf-8")
