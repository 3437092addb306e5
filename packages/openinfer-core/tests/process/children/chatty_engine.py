"""The main module of an engine process that prints before it says its address."""

import sys

sys.stdout.write("Welcome to chatty engine 1.0\n")
