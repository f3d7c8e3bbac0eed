"""A script that starts an upload at its end, and ends with 0: the upload goes on, also when it writes something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.waiting import wait_until

#: Each of them waits until the launcher has ended, writes more than a pipe holds, and says that it has come to its end.
SCRIPT = """
import os, subprocess, sys
folder, launcher = sys.argv[1], os.getppid()
work = '''
while kill -0 {launcher} 2>/dev/null; do sleep 0.05; done
yes {name} | head -20000
echo {name} has ended
touch {folder}/{name}
'''
def shell(name):
    return ["sh", "-c", work.format(launcher=launcher, name=name, folder=folder)]
subprocess.Popen(shell("popen"))
subprocess.Popen(shell("session"), start_new_session=True)
os.system(f"nohup sh -c '{shell('nohup')[2]}' &")
"""
NAMES = ["popen", "session", "nohup"]


def test_what_a_script_has_left_running_goes_on_after_the_launchers_end(tmp_path: Path) -> None:
    script, screen = tmp_path / "script.py", tmp_path / "screen.txt"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torchelastic.launch", "run", "--standalone", str(script), str(tmp_path)]
    with screen.open("w") as out:
        assert subprocess.run(command, stdout=out, stderr=out, timeout=60, check=False).returncode == 0
    said = screen.read_text()
    assert "worker 0 has left running what it has started: sh -c while kill -0" in said
    for name in NAMES:
        wait_until((tmp_path / name).exists, 30, f"{name} comes to its end", screen.read_text)
    wait_until(lambda: all(f"{name} has ended" in screen.read_text() for name in NAMES), 30, "it is on the screen")
