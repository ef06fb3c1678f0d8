"""The same as `lamella bench throughput`, for those who look for it here."""

import sys

from lamella.cli import main

if __name__ == "__main__":
    main(["bench", "throughput", *sys.argv[1:]])
