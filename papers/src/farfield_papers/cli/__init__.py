"""The commands of `farfield` for the papers: `fit validate test predict`, `demo recipes models maps explore`."""
