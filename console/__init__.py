"""The command line's other half: what commands read, show and return. `cli.py` only dispatches.

terminal.py  stdout, stderr, JSON lines        guard.py    errors to blocks and exit codes
progress.py  bars, plain lines, events         tables.py   aligned text, sizes and times
recipes.py   YAML recipes                      options.py  flags and recipe -> BuildRequest
build.py     spike build                       golden.py   spike golden record, check, diff
generate.py  spike run: one answer             chat.py     spike run: a conversation
inspect.py   spike inspect, verify             doctor.py   spike doctor
explain.py   spike explain, from docs/errors.md

Nothing here imports torch, numpy or onnxruntime before a command needs it.
"""
