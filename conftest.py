"""What holds for every test of the workspace."""

import os

# OpenBLAS' threads spin while they wait for each other, so that two busy processes on two cores slow each other
# down a hundredfold. Read when NumPy is loaded, which is after this file.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
