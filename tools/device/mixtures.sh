#!/bin/bash
# Qwen's mixtures on one GPU of 80 GB or more, in about 200 s: tools/device/mixtures.sh OUT COMMIT
# Weights are random, of normal scale, the router's too, so that tokens spread over the experts. First the kernels and engines against the
# CPU's; then TPOT and prefill of both models; then how many experts a step's tokens hit, which says what a step has to read.
# A part that fails does not stop the others.
set -u
out=$1 commit=$2
here=$(cd "$(dirname "$0")" && pwd)
packages=$here/../../packages
configs=$(mktemp -d)
mkdir -p "$out"
PYTHONPATH=$(python3 -c "import sys; sys.path.insert(0, '$here'); import source_packages as s; print(s.environment()['PYTHONPATH'])")
export PYTHONPATH
python3 "$here/published_configs.py" "$configs"

timeout 150 python3 -m pytest -q -p no:cacheprovider "$packages/openinfer-kernels/tests/moe" \
  "$packages/openinfer-qwen3/tests/test_gpu.py" "$packages/openinfer-qwen35/tests/test_gpu.py" \
  -k "routing or experts or moe" 2>&1 | tail -15

for model in qwen3-30b-a3b qwen3.5-35b-a3b; do
  timeout 120 python3 -P -m openinfer.commands.main bench offline --model "$configs/$model" --size 1x1024 8x1024 64x1024 \
    --option device=cuda --option load_format=dummy --option max_model_tokens=2048 --option max_num_seqs=64 \
    --commit "$commit" --json "$out/$model-offline.json"
  timeout 60 python3 "$here/experts_hit.py" "$configs/$model" --json "$out/$model-experts-hit.json"
done
