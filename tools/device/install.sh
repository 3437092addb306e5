# Sourced on the device machine: puts our wheels and the carried ones on the path.
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl .carry/dist/*.whl && export PYTHONPATH=/tmp/site PYTHONUNBUFFERED=1 || exit 1
