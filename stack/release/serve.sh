#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# `vllm serve` as both images start it: serve.sh MODEL [FLAG ...]. Nothing but /health
# answers without the key, and after SIGTERM running requests have 20 seconds. A flag of
# the caller wins over the same flag here.
set -eu
case " $* " in
    *" --api-key"* | *" --api_key"* | *" --headless "*) ;;
    *" --config "* | *" --help"* | *" -h "*) ;;
    *)
        if [ -z "${VLLM_API_KEY:-}" ]; then
            echo "serve.sh: the server has no key: set VLLM_API_KEY or give --api-key." \
                "Without one start \`vllm serve\` itself: every path is then open." >&2
            exit 2
        fi
        ;;
esac
folder=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="${folder}${PYTHONPATH:+:${PYTHONPATH}}"
# vLLM wants the model before all flags.
model=
case "${1:-}" in
    "" | -*) ;;
    *)
        model=$1
        shift
        ;;
esac
exec vllm serve ${model:+"$model"} \
    --middleware require_key.RequireKey --shutdown-timeout 20 "$@"
