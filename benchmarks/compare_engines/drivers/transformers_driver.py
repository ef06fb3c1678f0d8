"""transformers' side of the comparison: one static batch of all requests through `generate`."""

from wire import serve


def load(settings):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["num_threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32).eval()
    # End tokens are ignored: nothing stops before its length.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.do_sample = False

    def generate(prompts, output_tokens, shared_tokens):
        ids = torch.tensor(prompts)  # [num_requests, prompt_tokens]; all prompts of a workload are equally long
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=output_tokens)
        return output[:, ids.shape[1] :].tolist()

    return generate, {"attention": model.config._attn_implementation, "batching": "static, all requests at once"}


if __name__ == "__main__":
    serve(load, ("transformers", "torch", "numpy"))
