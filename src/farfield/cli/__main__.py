"""`python -m farfield.cli` is `farfield`."""

from farfield.cli import main

main()
