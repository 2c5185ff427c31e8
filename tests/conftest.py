"""What all tests share: the same examples on every machine, others when HEADWAY_FUZZ_EXAMPLES asks for more."""

import os

from hypothesis import settings

settings.register_profile("same", derandomize=True)
if "HEADWAY_FUZZ_EXAMPLES" not in os.environ:
    settings.load_profile("same")
