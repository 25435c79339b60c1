"""Chat templates in the form that each family publishes, written for the tests, and their tokens.

They keep what matters for masks: headers, ends of turns, where system prompts, tools and reasoning
go, what is left out of earlier turns. The fixed English around tools is shorter.
"""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# As published for models of images and text: a text is looped over too, letter by letter.
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reasoning only after the last question of a user; the last turn always has a think block.
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(asked=messages|length - 1, open=true) %}
{%- for m in messages[::-1] %}
    {%- if ns.open and m.role == 'user' %}
        {%- set ns.open = false %}{%- set ns.asked = messages|length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought = '' %}{%- set content = m.content %}
        {%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.asked and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- content }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

# Tools are named in the first question; one call in a turn; a result is written as JSON.
LLAMA3 = """
{{- '<|begin_of_text|>' }}
{%- set system = '' %}{%- set turns = messages %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}{%- set turns = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + system + '<|eot_id|>' }}
{%- for m in turns %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name }}
        {{- '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) }}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
        {%- if tools and loop.first %}
            {{- 'Functions:\n' }}
            {%- for tool in tools %}{{- (tool | tojson) + '\n' }}{%- endfor %}
        {%- endif %}
        {{- (m.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

# System prompt and tools are in the last question: earlier turns are written otherwise with
# later ones. No generation prompt; ids of calls have nine characters.
MISTRAL = """
{%- set system = '' %}{%- set turns = messages %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\n\n' %}{%- set turns = messages[1:] %}
{%- endif %}
{%- set ns = namespace(asked=-1) %}
{%- for m in turns %}{%- if m.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}
{%- endfor %}
{{- '<s>' }}
{%- for m in turns %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == ns.asked %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (system if loop.index0 == ns.asked else '') + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric with length 9!') }}
            {%- endif %}
            {%- set written = call.function | tojson %}
            {{- written[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- ']</s>' }}
    {%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + '</s>' }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' }}
        {{- m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

# The system prompt begins the first question; answers are the model's; turns must alternate.
GEMMA3 = """
{{- '<bos>' }}
{%- set system = '' %}{%- set turns = messages %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\n\n' %}{%- set turns = messages[1:] %}
{%- endif %}
{%- for m in turns %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
    {{- (system if loop.first else '') + (m.content | trim) + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}
"""

# Channels; reasoning before a call is left out once a final answer follows, and before an earlier
# final answer always. The last answer ends otherwise than earlier ones.
GPT_OSS = """
{{- '<|start|>system<|message|>Reasoning: medium<|end|>' }}
{%- set turns = messages %}{%- set instructions = '' %}
{%- if messages[0].role in ('system', 'developer') %}
    {%- set instructions = messages[0].content %}{%- set turns = messages[1:] %}
{%- endif %}
{%- if instructions or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if instructions %}{{- '# Instructions\n\n' + instructions + '\n\n' }}{%- endif %}
    {%- if tools %}
        {{- '# Tools\n\nnamespace functions {\n\n' }}
        {%- for tool in tools %}
            {{- 'type ' + tool.function.name + ' = (_: {\n' }}
            {%- for name, field in tool.function.parameters.properties.items() %}
                {{- name + ': ' + field.type + ',\n' }}
            {%- endfor %}
            {{- '}) => any;\n\n' }}
        {%- endfor %}
        {{- '} // namespace functions' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set ns = namespace(tool='', final=false) %}
{%- for m in turns %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- set ns.final = false %}
        {%- for later in turns[loop.index:] %}
            {%- if later.role == 'assistant' and not later.tool_calls %}
                {%- set ns.final = true %}
            {%- endif %}
        {%- endfor %}
        {%- set thought = m.content or m.thinking %}
        {%- if thought and not ns.final %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}{%- set ns.tool = call.name %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json' }}
        {{- '<|message|>' + (call.arguments | tojson) + '<|call|>' }}
    {%- elif m.role == 'assistant' and loop.last and not add_generation_prompt %}
        {%- if m.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' + ns.tool + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- (m.content | tojson) + '<|end|>' }}
    {%- else %}
        {{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

# Reasoning is cut from all answers, and the generation prompt opens it.
R1 = """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>' + m.content.split('</think>')[-1] + '<|eot|>' }}
    {%- else %}
        {{- '<|' + m.role + '|>' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\n' }}{%- endif %}
"""

# Reasoning is off without a value of a variable, and cut from all answers.
OFF_BY_DEFAULT = """
{%- if thinking is not defined %}{%- set thinking = false %}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|></think>' + m.content.split('</think>')[-1] + '<|eot|>' }}
    {%- else %}
        {{- '<|' + m.role + '|>' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' + ('<think>' if thinking else '</think>') }}
{%- endif %}
"""

TEMPLATES = {
    "chatml": CHATML,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma3": GEMMA3,
    "gpt_oss": GPT_OSS,
    "r1": R1,
    "off_by_default": OFF_BY_DEFAULT,
}
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "<bos>"),
    *("[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "<start_of_turn>", "<end_of_turn>", "<|begin_of_text|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|start|>", "<|end|>"),
    *("<|channel|>", "<|message|>", "<|return|>", "<|call|>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|eot|>"),
)
