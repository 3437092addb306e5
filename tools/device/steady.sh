#!/bin/bash
# Five minutes at 32 requests/s, a tenth of the clients leaving early: tools/device/steady.sh MODEL OUT COMMIT [SECONDS [FLAGS]]
# Weights are random; FLAGS go to the server. Prints percentiles, and memory and open requests at the begin, in the
# middle and at the end; writes OUT/qwen3-4b-steady.json with a sample every 5 s.
model=$1 out=$2 commit=$3 seconds=${4:-300}
mkdir -p "$out"
python3 -P -m openinfer.commands.main bench serve --model "$model" --device cuda --load-format dummy --workload qps=32 \
  --seconds "$seconds" --abort-share 0.1 --watch 5 --commit "$commit" --json "$out/qwen3-4b-steady.json" "${@:5}"
