#!/usr/bin/env bash
# Runs on a machine with a GPU, in under ten minutes: the tests, the limits, the peers and training steps.
#
#     bash benchmarks/gpu.sh                      # on CUDA: build/gpu/gpu.json and build/gpu/gpu.md
#     bash benchmarks/gpu.sh --out FOLDER
#     bash benchmarks/gpu.sh --device cpu         # everything small, to see that it runs
#
# Nothing is installed: it runs from a checkout with the Python that PYTHON names (default: python3), and prints which
# packages it lacks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" benchmarks/gpu.py "$@"
