"""The learned scales of the norms inside attention."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from farfield.nn.norm import CoefficientNorm

ENTRY = "coefficient_norm.weight"


def norm_scales(network: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the learned scales of all coefficient norms of a network, or of one of its checkpoints.

    A norm multiplies the normalised coefficients or responses by its scale, which starts at 1. There is one scale per
    head where products are normalised (KAN): a large one makes their softmax sharp. There is one per channel where
    responses are normalised (SAN): 0 switches off the response of the channel. The scales of a series of checkpoints
    show how much attention a network learns to use.

    Args:
        network: A network, or its state dict, such as `torch.load(path)["state_dict"]`.

    Returns:
        The path of each attention with a norm -> its scales, `(heads,)` or `(channels,)`; not copied.

    Reference: KAN §4.1, SAN Appendix.

    Example:
        >>> from farfield import maps, models
        >>> scales = maps.norm_scales(models.kanet("kronecker_qkv", num_classes=10, width=0.25))
        >>> len(scales), scales["rows.3.0.attention"]
        (10, tensor([1., 1., 1., 1.]))
    """
    if isinstance(network, nn.Module):
        norms = {name: norm for name, norm in network.named_modules() if isinstance(norm, CoefficientNorm)}
        return {name.rpartition(".")[0]: norm.weight.detach() for name, norm in norms.items()}
    return {
        name.removesuffix(f".{ENTRY}").removesuffix(ENTRY): scale
        for name, scale in network.items()
        if name.endswith(ENTRY)
    }
