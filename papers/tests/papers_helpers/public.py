"""What users of the papers' package rely on, as lines of text.

PYTHONPATH=tests:papers/tests python papers/tests/papers_helpers/public.py    # writes papers/tests/public.txt anew
"""

from __future__ import annotations

from helpers.public import ROOT, Distribution, lines

PAPERS = Distribution(
    folder=ROOT / "papers",
    packages=("farfield_papers.models", "farfield_papers.nn", "farfield_papers.theory"),
    classes={
        "farfield_papers.data.classify": ("Digits", "ImageFolders"),
        "farfield_papers.data.detect": ("CocoFolders",),
        "farfield_papers.data.generate": ("RealImages",),
        "farfield_papers.data.masked_lm": ("TextFolder",),
        "farfield_papers.data.restore": ("StackPairs",),
        "farfield_papers.data.segment": ("VOCFolders",),
        "farfield_papers.data.stereo": ("StereoFrames",),
        "farfield_papers.tasks.classify": ("Classify", "MirroredScores"),
        "farfield_papers.tasks.detect": ("Detect",),
        "farfield_papers.tasks.generate": ("Generate",),
        "farfield_papers.tasks.masked_lm": ("MaskedLM",),
        "farfield_papers.tasks.restore": ("Restore",),
        "farfield_papers.tasks.segment": ("Segment",),
        "farfield_papers.tasks.restore_stack": ("restore",),
        "farfield_papers.tasks.stereo": ("DisparityErrors", "Stereo"),
        "farfield_papers.tasks.metrics": ("CareMetrics", "care_metrics"),
        "farfield_papers.tasks.writers.detections": ("DetectionFolder",),
        "farfield_papers.tasks.writers.disparities": ("DisparityFolder",),
        "farfield_papers.tasks.writers.filled_blanks": ("FilledTable",),
        "farfield_papers.tasks.writers.predictions": ("PredictionTable",),
        "farfield_papers.tasks.writers.samples": ("SampleFolder",),
    },
    sources={},
    commands=("models", "maps", "recipes", "explore", "demo"),
)


if __name__ == "__main__":
    PAPERS.file.write_text("\n".join(lines(PAPERS)) + "\n", encoding="utf-8")
