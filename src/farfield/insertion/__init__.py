"""Global attention in other people's models: added where they are, without touching a weight that they have.

`insert` puts a module after any place of a model and leaves its output as it was; `remove` takes it out again.
`detector_places` and `resnet_places` translate the papers' names of places into paths. `replace_attention` puts a row
of the table in the place of the softmax attention that a transformer has; `register_transformers` offers the rows to
Hugging Face's transformers by name.
"""

from farfield.insertion.hugging_face import register_transformers
from farfield.insertion.inserting import insert, remove
from farfield.insertion.places import detector_places, resnet_places
from farfield.insertion.replacing import replace_attention

__all__ = ["detector_places", "insert", "register_transformers", "remove", "replace_attention", "resnet_places"]
