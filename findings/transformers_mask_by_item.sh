#!/usr/bin/env bash
# In transformers 5.24.0 a mask function that is set by item is in the table, and is not used: no mask is made at all.
#
# `ALL_ATTENTION_FUNCTIONS[name] = f` is enough to choose an attention implementation of one's own. The table of mask
# functions, ALL_MASK_ATTENTION_FUNCTIONS, is of the same kind: an item can be set, `name in table` is True and
# `table[name]` returns it. But masks are only made for names that were added by AttentionMaskInterface.register. For
# others attention gets `attention_mask=None`, without a warning. An implementation that adds the mask to its scores, as
# the model's own eager attention does, then sees all later tokens. Generating token by token hides it.
#
# Output seen on 2026-11-29 (largest change of the first token's logits when the last token is another one):
#   5.24.0 by item: known True, change 4.6e+00; by register: change 0.0e+00
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet --no-compile torch==2.13.0 transformers==5.24.0 2>"$work/pip.log" \
    || { cat "$work/pip.log"; exit 2; }
cat > "$work/masks.py" <<'PY'
import torch, transformers
from transformers import AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as MASKS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as ATTENTION
from transformers.models.llama.modeling_llama import eager_attention_forward

sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.2)).eval()


def change(name):
    model.set_attn_implementation(name)
    with torch.no_grad():
        first, other = (model(torch.tensor([[1, 2, 3, last]])).logits[0, 0] for last in (4, 5))
    return (first - other).abs().max().item()


ATTENTION["by_item"], MASKS["by_item"] = eager_attention_forward, MASKS["eager"]
ATTENTION["by_register"] = eager_attention_forward
AttentionMaskInterface.register("by_register", MASKS["eager"])
known, item, register = "by_item" in MASKS, change("by_item"), change("by_register")
print(f"{transformers.__version__} by item: known {known}, change {item:.1e}; by register: change {register:.1e}")
raise SystemExit(not (known and item > 1e-3 and register == 0))
PY
"$work/env/bin/python" "$work/masks.py"
