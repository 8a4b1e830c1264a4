"""Global attention in existing models, without changing or renaming their weights.

`insert` adds a new module after a module of a model; if the new one starts as the identity, the model's output stays
the same. `remove` takes it out again. `places` lists where a model takes one. `detector_places` and `resnet_places`
translate the papers' names of places into module paths. `replace_attention` replaces the softmax attention of a
transformer by another operator of `ops.OPERATORS`; `register_transformers` registers the operators with Hugging Face's
transformers by name.
"""

from farfield.insertion._insert.api import insert, remove
from farfield.insertion._insert.listing import InsertionPlace, places
from farfield.insertion._linearize.api import linearize
from farfield.insertion._linearize.report import LinearizeReport
from farfield.insertion._places import detector_places, resnet_places
from farfield.insertion._recipe import apply_recipe, save_recipe
from farfield.insertion._replace.api import replace_attention
from farfield.insertion._replace.hugging_face import register_transformers

__all__ = [
    "InsertionPlace",
    "LinearizeReport",
    "apply_recipe",
    "detector_places",
    "insert",
    "linearize",
    "places",
    "register_transformers",
    "remove",
    "replace_attention",
    "resnet_places",
    "save_recipe",
]
