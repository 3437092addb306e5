#!/bin/bash
# All files of results of Qwen3 on one H200, in about 200 s: tools/device/final.sh MODEL_4B MODEL_8B OUT COMMIT
# MODEL_*: folders with config.json and tokenizer; weights are random. `openinfer` and tools/device must be at hand.
set -u
model_4b=$1 model_8b=$2 out=$3 commit=$4
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"

offline() { # NAME MODEL SIZES…
  local name=$1 model=$2
  shift 2
  timeout 90 python3 -P -m openinfer.commands.main bench offline --model "$model" --size "$@" --option device=cuda \
    --option load_format=dummy --option max_model_tokens=20480 \
    --commit "$commit" --json "$out/$name-offline.json"
}

startup() { # NAME FLAGS…
  local name=$1
  shift
  timeout 60 python3 -P -m openinfer.commands.main bench startup --device cuda --commit "$commit" --json "$out/$name.json" "$@"
}

serve() { # prints each row as it comes; every workload has a seed of its own, so that no cache knows its prompts
  local url=$1 seed=100
  shift
  for workload in "$@"; do
    seed=$((seed + 1))
    timeout 60 python3 -P -m openinfer.commands.main bench serve --url "$url" --served-model 4b --workload "$workload" \
      --seed $seed --commit "$commit" --json "$out/serve-$seed.part"
  done
}

case ${5:-all} in all | offline-4b)
  offline qwen3-4b "$model_4b" 1x1024 8x1024 16x1024 32x1024 64x1024 128x1024 256x1024 1x16384 ;;
esac
case ${5:-all} in all | serve-4b)
  python3 -P -m openinfer.commands.main serve --model "$model_4b" --device cuda --load-format dummy --port 8123 --model-name 4b &
  server=$!
  until (echo > /dev/tcp/127.0.0.1/8123) 2>/dev/null || ! kill -0 $server; do sleep 0.1; done
  serve http://127.0.0.1:8123 bs1 prefill=1024 prefill=16384 warm=1024,16384 qps=16 qps=32 conc=64 conc=256 \
    conc=64:64x512 conc=256:64x512
  kill $server && wait $server
  python3 "$here/merge_rows.py" "$out"/serve-*.part > "$out/qwen3-4b-serve.json" && rm "$out"/serve-*.part ;;
esac
case ${5:-all} in all | startup-4b)
  startup qwen3-4b-startup-dummy --model "$model_4b" --load-format dummy
  scratch=$(mktemp -d)
  python3 "$here/checkpoint.py" --model "$model_4b" --out "$scratch/4b" --check &&
    startup qwen3-4b-startup --model "$scratch/4b"
  rm -rf "$scratch" ;;
esac
case ${5:-all} in all | offline-8b)
  offline qwen3-8b "$model_8b" 1x1024 8x1024 64x1024 1x16384 ;;
esac
