"""Chat templates written for the tests, one a construct, and conversations drawn at random."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

CALLS = "{%- for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
BODY = (
    """{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}
"""
    + CALLS
    + """
{{- '<|im_end|>\\n' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}"""
)
FOR, ENDFOR = "{%- for message in messages %}", "{%- endfor %}"
PROMPT = "\n{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
PLAIN = f"{FOR}\n{BODY}\n{ENDFOR}{PROMPT}"

THINKING = """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}
{%- if message.thinking and loop.index0 > ns.last %}{{- '<think>' + message.thinking + '</think>' }}{% endif %}
{{- message.content }}CALLS{{- '<|im_end|>\\n' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}""".replace("CALLS", CALLS)
MERGED = """{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<result>' + message.content + '</result>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- else %}BODY{% endif %}
{%- endfor %}""".replace("BODY", BODY)

# The constructs whose masks are transformers': templates with regions.
TEMPLATES = {
    "plain": PLAIN,
    "slice": f"{{{{- messages[0].content }}}}{{%- for message in messages[1:] %}}{BODY}{ENDFOR}{PROMPT}",
    "look-up": FOR
    + "{%- if message.role == 'tool' %}{%- for other in messages %}{%- for call in other.tool_calls or [] %}"
    + "{{- call.function.name }}{% endfor %}{% endfor %}{% endif %}"
    + f"{BODY}{ENDFOR}{PROMPT}",
    "first outside": "{%- if tools %}{%- for tool in tools %}{{- tool.function.name }}{% endfor %}"
    "{{- '<|im_start|>user\\n' + messages[0].content + '<|im_end|>\\n' }}{%- set messages = messages[1:] %}{% endif %}"
    + PLAIN,
    "filter": f"{{%- for message in messages | rejectattr('role', 'equalto', 'system') %}}{BODY}{ENDFOR}{PROMPT}",
    "reversed": f"{{%- for message in messages[::-1] %}}{BODY}{ENDFOR}{PROMPT}",
    "alias": f"{{%- set them = messages %}}{{%- for message in them %}}{BODY}{ENDFOR}{PROMPT}",
    "namespace": "{%- set ns = namespace(them=[]) %}{%- for m in messages %}{%- set ns.them = ns.them + [m] %}"
    f"{{%- endfor %}}{{%- for message in ns.them %}}{BODY}{ENDFOR}{PROMPT}",
    "index": f"{{%- for i in range(messages | length) %}}{{%- set message = messages[i] %}}{BODY}{ENDFOR}{PROMPT}",
    "batch": "{%- for pair in messages | batch(2) %}{%- for message in pair %}" + BODY + ENDFOR + ENDFOR + PROMPT,
    "continue": FOR
    + "{%- if message.role == 'system' %}{{- 'S' }}{%- continue %}{% endif %}"
    + f"{BODY}{ENDFOR}{PROMPT}",
    "break": FOR
    + "{%- if loop.index > 4 and message.role == 'user' %}{{- 'END' }}{%- break %}{% endif %}"
    + f"{BODY}{ENDFOR}{PROMPT}",
    "thinking": THINKING + PROMPT,
    "merged tools": MERGED + PROMPT,
    "date": "{{- strftime_now('%d %b %Y') }}" + PLAIN,
    "raise": FOR
    + "{%- if message.role == 'system' and loop.length > 5 %}{{- raise_exception('too many') }}{% endif %}"
    + f"{BODY}{ENDFOR}{PROMPT}",
}
# Inside these transformers counts the places of a region from the block's first character. Each writes what PLAIN
# writes, the last one after CHANGED, so the masks are those of PLAIN.
BLOCKS = {
    "macro": f"{{%- macro turn(message) %}}{BODY}{{% endmacro %}}{FOR}{{{{- turn(message) }}}}{ENDFOR}{PROMPT}",
    "loop in a macro": f"{{%- macro turns(messages) %}}{FOR}{BODY}{ENDFOR}{{% endmacro %}}"
    f"{{{{- turns(messages) }}}}{PROMPT}",
    "set block": f"{FOR}{{%- set turn %}}{BODY}{{% endset %}}{{{{- turn }}}}{ENDFOR}{PROMPT}",
    "loop in a set block": f"{{%- set turns %}}{FOR}{BODY}{ENDFOR}{{% endset %}}{{{{- turns }}}}{PROMPT}",
    "filter block": f"{FOR}{{%- filter replace('tree', 'evergreen') %}}{BODY}{{% endfilter %}}{ENDFOR}{PROMPT}",
    "loop in a filter block": f"{{%- filter replace('tree', 'evergreen') %}}{FOR}{BODY}{ENDFOR}{{% endfilter %}}"
    f"{PROMPT}",
}
TOOLS = {"first outside": [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]}
CHANGED = {"filter block", "loop in a filter block"}
WORDS = "river stone e\u0301t\u00e9 \U0001f600 cat <|im_end|> tree 17 blue".split()


def without_regions(source: str) -> str:
    """Returns the twin of a template, which says nothing of what is learned."""
    return source.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def draw(rng: random.Random) -> list[dict[str, Any]]:
    """Draws a conversation, half of the answers with calls of tools."""

    def text() -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 9)))

    def answer() -> dict[str, Any]:
        reasoning = {rng.choice(("thinking", "reasoning", "reasoning_content")): text()} if rng.random() < 0.5 else {}
        return {"role": "assistant", "content": text()} | reasoning

    found: list[dict[str, Any]] = [{"role": "system", "content": text()}] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 4)):
        found.append({"role": "user", "content": text()})
        if rng.random() < 0.5:
            calls = [
                {"type": "function", "function": {"name": "f", "arguments": {"word": rng.choice(WORDS)}}}
                for _ in range(rng.randint(1, 3))
            ]
            found.append(answer() | {"content": "", "tool_calls": calls})
            found += [{"role": "tool", "content": text()} for _ in calls]
        found.append(answer())
    return found


# Templates that leave messages out, and which: those at and behind the first message that a condition holds for.
LEAVES_OUT = {"filter": "system", "continue": "system", "break": "user"}


def without_words(messages: list[dict[str, Any]], construct: str) -> list[dict[str, Any]]:
    """Returns messages of which those that a template leaves out have no words."""
    role = LEAVES_OUT.get(construct)
    found: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        is_out = role == message["role"] and (role == "system" or number >= 4)
        is_behind = role == "user" and bool(found) and number > 4 and found[-1]["content"] == ""
        found.append({"role": message["role"], "content": ""} if is_out or is_behind else message)
    return found


def replaced(messages: list[dict[str, Any]], old: str, new: str) -> list[dict[str, Any]]:
    """Returns messages with another word everywhere."""
    return json.loads(json.dumps(messages).replace(old, new))


def make_tokenizer(folder: Path) -> Any:
    """Trains a tokenizer of 400 tokens, writes it and returns it as transformers has it."""
    import tokenizers
    import transformers

    level = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=level.alphabet())
    made.train_from_iterator([" ".join(WORDS)] * 9, trainer)
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    found.save_pretrained(folder)
    return found


# Shapes of published templates, without regions: ChatML, which writes whatever role it gets; one of a model that
# thinks, which leaves out the thoughts of earlier turns, unknown roles and contents that are no text; one that folds
# the system message into the first question and refuses unknown roles; one that writes the system message before its
# loop, tools' results as JSON, and one call a turn in place of the text.
CHATML = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{{- m.content }}
{%- for call in m.tool_calls or [] %}{{- '<call>' }}{{- call.function | tojson }}{{- '</call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
THINKS = """{%- set ns = namespace(last=messages | length - 1, seek=true) -%}
{%- for m in messages[::-1] -%}{%- if ns.seek and m.role == 'user' and m.content is string -%}
{%- set ns.seek = false -%}{%- set ns.last = messages | length - 1 - loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- set c = m.content if m.content is string else '' -%}
{%- if m.role in ('user', 'system') -%}{{ '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' -%}
{%- set r = m.reasoning_content if m.reasoning_content is string else '' -%}
{%- if not r and '</think>' in c -%}
{%- set r = c.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set c = c.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}
{{ '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or r) -%}{{ '<think>\\n' + r + '\\n</think>\\n\\n' }}{%- endif -%}
{{ c }}
{%- for t in m.tool_calls or [] -%}{%- set f = t.function or t -%}
{{ '\\n<tool_call>\\n{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' + c + '\\n</tool_response><|im_end|>\\n' }}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
FOLDS = """{%- if messages[0].role == 'system' %}{%- set system = messages[0].content + '\\n\\n' %}
{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}
{{- '<s>' }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST]' + (system if loop.first else '') + m.content | trim + '[/INST]' }}
{%- elif m.role == 'assistant' %}
{%- if m.tool_calls %}{{- '[CALLS][' }}{%- for call in m.tool_calls %}
{{- '{"arguments": ' + call.function.arguments | tojson + ', "name": "' + call.function.name + '"}' }}
{%- endfor %}{{- ']' }}{%- else %}{{- m.content | trim }}{%- endif %}{{- '</s>' }}
{%- elif m.role == 'tool' %}{{- '[RESULTS]{"content": ' + m.content | tojson + '}[/RESULTS]' }}
{%- else %}{{- raise_exception('only user, assistant and tool') }}{%- endif %}
{%- endfor %}"""
HEADERS = """{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|header|>system<|end|>\\nToday: 26 Jul 2024\\n\\n' + system + '<|eot|>' }}
{%- for m in messages %}
{%- if not (m.role == 'tool' or 'tool_calls' in m) %}
{{- '<|header|>' + m.role + '<|end|>\\n\\n' + m.content | trim + '<|eot|>' }}
{%- elif 'tool_calls' in m %}
{%- set call = m.tool_calls[0].function %}{{- '<|header|>assistant<|end|>\\n\\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot|>' }}
{%- else %}{{- '<|header|>ipython<|end|>\\n\\n' }}
{%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}{%- else %}{{- m.content }}{%- endif %}
{{- '<|eot|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|end|>\\n\\n' }}{% endif %}"""
SHAPES = {"chatml": CHATML, "thinks": THINKS, "folds": FOLDS, "headers": HEADERS}
