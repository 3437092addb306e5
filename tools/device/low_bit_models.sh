#!/bin/bash
# Qwen3 in BF16, FP8 and AWQ on one GPU, in about 150 s: tools/device/low_bit_models.sh OUT COMMIT
# Weights are random codes of the real shapes; the three formats of a size take turns on one card, so that they can be compared. A part that
# fails does not stop the others.
set -u
out=$1 commit=$2
here=$(cd "$(dirname "$0")" && pwd)
configs=$(mktemp -d)
mkdir -p "$out"
PYTHONPATH=$(python3 -c "import sys; sys.path.insert(0, '$here'); import source_packages as s; print(s.environment()['PYTHONPATH'])")
export PYTHONPATH
python3 "$here/published_configs.py" "$configs"

offline() { # MODEL SIZES…
  local model=$1
  shift
  echo "$model"
  timeout 60 python3 -P -m openinfer.commands.main bench offline --model "$configs/$model" --size "$@" --option device=cuda \
    --option load_format=dummy --option max_model_tokens=20480 --commit "$commit" --json "$out/$model-low-bit-offline.json"
}

for format in "" -fp8 -awq; do
  offline qwen3-4b$format 1x1024 8x1024 16x1024 32x1024 64x1024 128x1024 256x1024 1x16384
done
for format in "" -fp8 -awq; do
  offline qwen3-8b$format 1x1024 8x1024 64x1024
done
rm -rf "$configs"
