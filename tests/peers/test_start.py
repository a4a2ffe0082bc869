"""Modules that the start of a program does not load."""

import subprocess
import sys

CODE = """
import sys
from peers.command_line.command import program

@program("nothing")
def main() -> None:
    import hivemind
    assert "scipy.optimize._linprog" not in sys.modules
    from hivemind.averaging.load_balancing import load_balance_peers
    assert sum(load_balance_peers(100, [1.0, 2.0])) == 100
    assert "scipy.optimize._linprog" in sys.modules
    import scipy.stats

main([])
"""


def test_a_program_imports_scipys_optimiser_only_when_it_is_used() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
