"""What the norms inside attention have learned."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from farfield.nn.norm import CoefficientNorm

ENTRY = "coefficient_norm.weight"


def norm_scales(network: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the learned scales of all coefficient norms of a network, or of one of its checkpoints.

    A scale is what a norm multiplies normed coefficients or responses by; it starts at 1. One a head where products are
    normed (KAN), a large one making their softmax sharp; one a channel where responses are (SAN), 0 switching off what
    the channel hears from afar. Read off one checkpoint after the other, they tell how much attention a network learns
    to use.

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
