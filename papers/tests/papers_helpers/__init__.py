"""What the tests of the papers share: made data, quiet runs, and small networks that are saved or trained."""
