"""OpenVINO GenAI's side of the comparison: its continuous-batching pipeline with prefix caching."""

from wire import serve

# The scheduler's own default of 256 is for serving, where a step is to be short.
MAX_BATCHED_TOKENS = 2048


def load(settings):
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = settings["kv_cache_bytes"] >> 30  # GiB
    scheduler.enable_prefix_caching = True
    scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
    properties = {"INFERENCE_NUM_THREADS": settings["num_threads"]}
    pipeline = genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)

    def generate(prompts, output_tokens, shared_tokens):
        config = genai.GenerationConfig()
        config.max_new_tokens = output_tokens
        config.ignore_eos = True
        config.do_sample = False

        def answers(some):
            tensors = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in some]
            return [result.m_generation_ids[0] for result in pipeline.generate(tensors, [config] * len(tensors))]

        # It looks for cached prefixes as requests come, so one that many share is there only after a first request.
        first = prompts[:1] if shared_tokens else []
        return (answers(first) if first else []) + answers(prompts[len(first) :])

    return generate, {
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "prefix caching": True,
    }


if __name__ == "__main__":
    serve(load, ("openvino", "openvino-genai", "openvino-tokenizers", "numpy"))
