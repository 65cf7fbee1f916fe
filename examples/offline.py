"""A batch of prompts and a conversation, without a server."""

from kunserve import LLM, SamplingParams

with LLM("smollm2-135m", num_instances=2, instance_memory="600MiB") as llm:
    params = SamplingParams(temperature=0, max_tokens=32, logprobs=1)
    for output in llm.generate(["Once upon a time", "2, 4, 6,"], params):
        print(output.prompt, "->", output.outputs[0].text)
    (answer,) = llm.chat([{"role": "user", "content": "What is the capital of France?"}], params)
    print(answer.outputs[0].text)
