"""Programs that tests run in environments of their own import packages that this one lacks."""

collect_ignore_glob = ["*_program.py"]
