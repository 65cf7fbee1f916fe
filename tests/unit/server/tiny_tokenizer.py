"""A byte-level tokenizer made in memory, with a chat template."""

import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world, hello there", "Paris!"]
TEMPLATE = (
    "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<|start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}:{{ call.function.arguments.city }}{% endfor %}"
    "<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@functools.cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """At most 300 tokens; ``<|end|>`` ends a reply."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|end|>", "<|start|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE
    )


def ids(text: str) -> list[int]:
    """The tokens of a text, without those that begin a prompt."""
    return list(tiny_tokenizer().backend_tokenizer.encode(text).ids)
