"""The embedded rollout engine: SGLang's HTTP surface over a small CPU decode loop.

Start one with ``python -m colchis.components.engine --port 30001 --model-path DIR``. It speaks the routes that an RL
loop uses (generate, weight update from disk, pause, abort, flush, checksums) with SGLang 0.5's field names, so a client
written for it works against the real server. It deviates on purpose where that server dies or lies on bad input: the
answer is 400 with the reason, and the weights stay as they were.
"""
