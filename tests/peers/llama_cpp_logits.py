"""Logits of llama.cpp after a prompt, as JSON: llama_cpp_logits.py FILE.gguf TOKEN [..]. Alone, since it may abort."""

import json
import sys

from ik_llama_cpp._internals import IkContext, IkModel, make_batch

model = IkModel(sys.argv[1])
context = IkContext(model, n_ctx=64, n_threads=1, flash_attn=False)
assert context.decode(make_batch([int(token) for token in sys.argv[2:]])) == 0
logits = context.get_logits(-1)
print(json.dumps([logits[i] for i in range(model.n_vocab)]))
