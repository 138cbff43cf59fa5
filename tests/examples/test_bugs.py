"""Pictures of ptxemu's README: five bugs of one kernel, and the report of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from pictures import BUGS, FOLDER, HERE, text_of

REPORTS = """\
import json, pictures
print(json.dumps({bug.name: pictures.lines_of(bug, text) for bug, text in pictures.reports()}))
"""


def test_pictures_show_what_is_said_now():
    """The reports are made in a fresh process, since the compiled code contains line numbers of
    Python files.
    """
    environment = {**os.environ, "PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore"}
    made = [sys.executable, "-c", REPORTS]
    done = subprocess.run(made, env=environment, capture_output=True, text=True, check=True)
    now = json.loads(done.stdout)
    for bug in BUGS:
        shown = text_of((FOLDER / f"{bug.name}.svg").read_text(encoding="utf-8"))
        wanted = "".join("".join(now[bug.name]).split())
        assert shown == wanted, "python examples/bugs/pictures.py makes the pictures anew"
