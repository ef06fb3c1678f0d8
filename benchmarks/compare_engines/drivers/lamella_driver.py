"""lamella's side of the comparison."""

from wire import serve


def load(settings):
    import torch

    from lamella import LLM, SamplingParams, __version__

    torch.set_num_threads(settings["num_threads"])
    quantization = {"quantization": settings["quantization"]} if "quantization" in settings else {}
    llm = LLM(
        settings["model"],
        dtype="float32",
        max_model_len=settings["max_model_len"],
        kv_cache_memory_bytes=settings["kv_cache_bytes"],
        **quantization,
    )

    def generate(prompts, output_tokens, shared_tokens):
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    config = llm.engine.config
    return generate, {
        "lamella": __version__,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "prefix caching": config.enable_prefix_caching,
        "attention_backend": config.attention_backend,
    }


if __name__ == "__main__":
    serve(load, ("torch", "numpy"))
