"""llama.cpp's side of the comparison: batched decoding through the low-level API of llama-cpp-python.

`llama_decode` takes the tokens of many sequences at once; the scheduling that a server would do is done here in its
simplest form: prompts in full batches, then one token of every sequence per step.
"""

import ctypes

import numpy as np
from wire import serve

BATCH_TOKENS = 2048
MICRO_BATCH_TOKENS = 512  # llama.cpp's own default


class Context:
    """A KV cache for the sequences of one workload."""

    def __init__(self, lib, model, num_threads, num_sequences, num_tokens, is_unified):
        params = lib.llama_context_default_params()
        params.n_seq_max = num_sequences
        params.n_batch = BATCH_TOKENS
        params.n_ubatch = MICRO_BATCH_TOKENS
        params.n_threads = params.n_threads_batch = num_threads
        # Of one buffer every step attends to all cells, the other sequences' masked; with a buffer per sequence a
        # prefix cannot be shared. llama.cpp's advice is one buffer where sequences share much, else one each.
        params.kv_unified = is_unified
        params.swa_full = False
        if is_unified:
            params.n_ctx = num_tokens
        else:
            params.n_ctx = num_tokens // num_sequences * num_sequences
        self.lib = lib
        self.context = lib.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp made no context of {params.n_ctx} tokens for {num_sequences} sequences")
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self.batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.num_filled = self.num_wanted = 0

    def free(self):
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.context)

    def add(self, token, position, sequence, wants_logits):
        batch, index = self.batch, self.num_filled
        batch.token[index] = token
        batch.pos[index] = position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = sequence
        batch.logits[index] = wants_logits
        self.num_filled += 1
        self.num_wanted += wants_logits

    @property
    def is_full(self):
        return self.num_filled == BATCH_TOKENS

    def decode(self):
        """Run what was added; the most likely token of each that wanted logits, in the order they were added."""
        self.batch.n_tokens = self.num_filled
        num_wanted, self.num_filled, self.num_wanted = self.num_wanted, 0, 0
        code = self.lib.llama_decode(self.context, self.batch)
        if code:
            raise RuntimeError(f"llama_decode answered {code}")
        if not num_wanted:
            return []
        address = ctypes.cast(self.lib.llama_get_logits(self.context), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(address, (num_wanted, self.vocab_size)).argmax(axis=1).tolist()

    def share(self, num_sequences):
        """Give what sequence 0 has to all others."""
        memory = self.lib.llama_get_memory(self.context)
        for sequence in range(1, num_sequences):
            self.lib.llama_memory_seq_cp(memory, 0, sequence, -1, -1)


def load(settings):
    import llama_cpp as lib

    lib.llama_backend_init()
    model_params = lib.llama_model_default_params()
    model = lib.llama_model_load_from_file(settings["model"].encode(), model_params)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {settings['model']}")

    def generate(prompts, output_tokens, shared_tokens):
        num_own = len(prompts[0]) - shared_tokens + output_tokens
        context = Context(
            lib, model, settings["num_threads"], len(prompts),
            shared_tokens + num_own * len(prompts), settings["kv_unified"] or shared_tokens > 0,
        )  # fmt: skip
        try:
            return run(context, prompts, output_tokens, shared_tokens)
        finally:
            context.free()

    return generate, {
        "n_batch": BATCH_TOKENS,
        "n_ubatch": MICRO_BATCH_TOKENS,
        "swa_full": False,
        "KV": "float16, the default",
        "kv_unified": settings["kv_unified"] or "where a prefix is shared",
        "system": lib.llama_print_system_info().decode(),
    }


def run(context, prompts, output_tokens, shared_tokens):
    for position, token in enumerate(prompts[0][:shared_tokens]):
        context.add(token, position, 0, False)
        if context.is_full:
            context.decode()
    if context.num_filled:
        context.decode()
    if shared_tokens:
        context.share(len(prompts))
    outputs: list = [[] for _ in prompts]
    waiting: list = []  # sequences whose last prompt token is in the batch being filled
    for sequence, prompt in enumerate(prompts):
        for position in range(shared_tokens, len(prompt)):
            is_last = position == len(prompt) - 1
            context.add(prompt[position], position, sequence, is_last)
            if is_last:
                waiting.append(sequence)
            if context.is_full:
                waiting = take(context, waiting, outputs)
    if context.num_filled:
        take(context, waiting, outputs)
    for step in range(1, output_tokens):
        for sequence, output in enumerate(outputs):
            context.add(output[-1], len(prompts[sequence]) + step - 1, sequence, True)
        take(context, range(len(prompts)), outputs)
    return outputs


def take(context, sequences, outputs):
    """Run the batch and append each sequence's token; the sequences that wait then: none."""
    for sequence, token in zip(sequences, context.decode(), strict=True):
        outputs[sequence].append(token)
    return []


if __name__ == "__main__":
    serve(load, ("llama-cpp-python", "numpy"))
