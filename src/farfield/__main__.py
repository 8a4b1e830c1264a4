"""`python -m farfield` is `farfield`."""

from farfield.cli import main

main()
