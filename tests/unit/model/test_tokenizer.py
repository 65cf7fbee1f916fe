import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from kunserve.core.errors import ModelFiles, UnsupportedModel
from kunserve.model.source import ModelSource, resolve_model
from kunserve.model.tokenizer import eos_token_ids, load_tokenizer

TEXTS = [
    "What is the capital of France?",
    "I've 12345 things\n\n  to do, naïve café 東京 🎉 def f(x):\n\treturn x**2   ",
    "<|im_start|>user\nhi<|im_end|>",
]


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer(resolve_model("smollm2-135m"))


def test_the_built_in_tokenizer(smollm2) -> None:
    for text in TEXTS:
        assert smollm2.decode(smollm2.encode(text)) == text
    # What the model's original tokenizer gives.
    assert smollm2.encode("Hello, world! I've 12") == [19556, 28, 905, 17, 339, 3543, 216, 33, 34]
    assert smollm2.encode("<|im_start|>user") == [1, 4093]
    assert smollm2.decode([1, 4093], skip_special_tokens=True) == "user"
    assert eos_token_ids(resolve_model("smollm2-135m"), smollm2) == (2,)


def test_its_chat_template(smollm2) -> None:
    text = smollm2.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_no_torch_is_imported() -> None:
    code = (
        "import sys\n"
        "from kunserve.model.source import resolve_model\n"
        "from kunserve.model.config import read_spec\n"
        "from kunserve.model.tokenizer import load_tokenizer\n"
        "source = resolve_model('smollm2-135m')\n"
        "read_spec(source, 'bfloat16'); load_tokenizer(source)\n"
        "assert 'torch' not in sys.modules and 'gguf' not in sys.modules\n"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def trained() -> Tokenizer:
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 4, trainer)
    return backend


def write_vocabulary(path: Path, tokens: list[str], **keys: object) -> ModelSource:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_token_list(tokens)
    for key, value in keys.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return ModelSource("m", path, "gguf")


def test_byte_level_vocabulary_from_gguf(tmp_path: Path) -> None:
    backend = trained()
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(pair) for pair in model["merges"]]
    kinds = [3] + [1] * (len(tokens) - 1)
    source = write_vocabulary(
        tmp_path / "m.gguf",
        tokens,
        tokenizer_model="gpt2",
        tokenizer_pre="gpt-2",
        token_merges=merges,
        token_types=kinds,
        eos_token_id=0,
    )
    loaded = load_tokenizer(source)
    for text in TEXTS:
        assert loaded.encode(text) == backend.encode(text).ids
        assert loaded.decode(loaded.encode(text)) == text
    assert loaded.eos_token == "<|end|>" and loaded.chat_template is None


def test_sentencepiece_vocabulary_from_gguf(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "▁hel", "▁hello"]
    tokens = pieces + words
    scores = [0.0] * len(pieces) + [-float(10 - i) for i in range(len(words))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(words)
    source = write_vocabulary(
        tmp_path / "m.gguf",
        tokens,
        tokenizer_model="llama",
        token_scores=scores,
        token_types=kinds,
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
    )
    loaded = load_tokenizer(source)
    assert loaded.encode("hello") == [1, tokens.index("▁hello")]
    ids = loaded.encode("hello é", add_special_tokens=False)
    assert ids[-2:] == [tokens.index("<0xC3>"), tokens.index("<0xA9>")]
    assert loaded.decode(ids) == "hello é"


def test_unknown_rules_are_refused(tmp_path: Path) -> None:
    source = write_vocabulary(
        tmp_path / "m.gguf",
        ["a", "b", "ab"],
        tokenizer_model="gpt2",
        tokenizer_pre="invented",
        token_merges=["a b"],
    )
    with pytest.raises(UnsupportedModel, match="'invented' is not known"):
        load_tokenizer(source)


def test_a_folders_tokenizer_and_another_one(tmp_path: Path) -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=trained(), eos_token="<|end|>")
    fast.chat_template = "{{ messages[0]['content'] }}"
    fast.save_pretrained(tmp_path)
    source = ModelSource("m", tmp_path, "safetensors")
    loaded = load_tokenizer(source)
    assert loaded.encode(TEXTS[0]) == fast.encode(TEXTS[0])
    assert loaded.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert eos_token_ids(source, loaded) == (5, 6, 0)
    elsewhere = load_tokenizer(resolve_model("smollm2-135m"), str(tmp_path))
    assert elsewhere.encode(TEXTS[0]) == fast.encode(TEXTS[0])


def test_a_broken_tokenizer_names_its_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelFiles, match="its tokenizer cannot be loaded"):
        load_tokenizer(ModelSource("m", tmp_path, "safetensors"))
