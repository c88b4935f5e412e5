"""Chat templates of several families, and a tokenizer for them of a few characters and pairs of letters."""

from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

CHATML = """{% if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """<s>{% for m in messages %}<|head|>{{ m.role }}<|/head|>

{{ m.content | trim }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>

{% endif %}"""
INST = """<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}<|im_end|>{% else %}[INST] \
{{ m.content }} [/INST]{% endif %}{% endfor %}"""
# Qwen3's way: thinking is left out of earlier turns.
FORGETS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPECIAL = ["<pad>", "<unk>", "<s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>"]


def tokenizer(template: str, letters: str = "") -> Any:
    """One token a character, a pair of these letters, and the special ones."""
    characters = [chr(i) for i in range(32, 127)] + ["\n"]
    pairs = [(a, b) for a in letters for b in letters]
    vocabulary = [*SPECIAL, *characters, *map("".join, pairs)]
    tokens = Tokenizer(models.BPE({t: i for i, t in enumerate(vocabulary)}, pairs, unk_token="<unk>"))
    tokens.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", unk_token="<unk>", eos_token="<|im_end|>"
    )
    fast.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    fast.chat_template = template
    return fast
