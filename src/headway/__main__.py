"""The command `headway`, and `python -m headway`."""

import atexit
import gc
import sys


def main() -> int:
    """Run the command of the process. Ctrl-C ends it quietly while its modules are imported, too."""
    atexit.register(gc.freeze)  # the process is about to give back all of its memory: no collection frees any before
    try:
        from headway.cli import main as run

        if sys.argv[1:2] == ["plan"]:  # it simulates many runs, and the process is its own
            from headway.scenario.processes import collect_rarely

            collect_rarely()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
