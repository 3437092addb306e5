"""What holds for every test of the workspace; `./run alone` copies this file next to a package's tests."""

import os

# OpenBLAS' threads spin while they wait for each other, so that two busy processes on two cores slow each other
# down a hundredfold. Read when NumPy is loaded, which is after this file.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

try:
    from hypothesis import settings
except ImportError:  # of a package whose tests do without it
    pass
else:
    # The same examples in every run, so that a change that lands is not refused for what another one brought in.
    # `--hypothesis-profile=default` draws new ones: see CONTRIBUTING.md.
    settings.load_profile("ci")
