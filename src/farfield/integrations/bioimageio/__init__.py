"""bioimage.io: packages of trained networks run over volumes larger than memory, and are written.

What a package says is read, checked and applied by bioimageio.spec and bioimageio.core; `predict_whole` runs its
network, and the statistics of its preprocessing are those of the whole volume.
"""

from farfield._checks import install_command

try:
    from farfield.integrations.bioimageio.reading import Package, open_package
    from farfield.integrations.bioimageio.writing import export_package
except ModuleNotFoundError as error:
    if (error.name or "").startswith("farfield"):
        raise
    raise ModuleNotFoundError(
        f"farfield.integrations.bioimageio: {error.name} is not installed; fix: {install_command('bioimageio')}",
        name=error.name,
    ) from error

__all__ = ["Package", "export_package", "open_package"]
